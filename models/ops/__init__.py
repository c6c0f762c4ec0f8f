"""Dispatch of a round's operations to mlx, `models/cpu` or `models/cuda`.

Functions that mlx-lm's layers call are replaced during a round, in the round's thread
only.
"""
