"""The commands of `mlx-speculation`, one file for each."""
