"""The commands of `mlx-speculation`, one file for each.

A command reads its options, calls the public interface and shows results. The modules
of `cli` itself define shared options, draw tables and report errors.
"""
