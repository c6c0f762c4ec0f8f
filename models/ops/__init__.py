"""Dispatch of a round's operations to mlx's functions or a room's (`device_ops`).

Functions that mlx-lm's layers call are replaced during a round, in the round's thread
only.
"""
