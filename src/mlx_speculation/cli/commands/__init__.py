"""The commands of `mlx-speculation`, one file for each.

They read options and print; `cli` has what they share, and no command imports another.
"""
