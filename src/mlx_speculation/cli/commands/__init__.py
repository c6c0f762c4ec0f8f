"""The commands of `mlx-speculation`, one file for each.

A command reads its options, calls the public interface and shows results. How options
are grouped, tables drawn and errors reported is one folder up.
"""
