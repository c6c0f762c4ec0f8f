"""The commands of `mlx-speculation`, one file for each.

A command reads its options, calls the public interface and shows results. The folder
above groups options, draws tables and reports errors.
"""
