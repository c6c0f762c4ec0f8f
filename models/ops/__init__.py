"""Dispatch of a round's operations between mlx's own functions and the rooms' ops.

It replaces functions that mlx-lm's layers call, during a round and in its thread only.
It knows shapes and devices. It does not know drafters, caches or tokens, nor the rooms
by name.
"""

from mlx_speculation.models.ops.dispatch import (
    compiled_steps,
    stream_resources,
)

__all__ = ["compiled_steps", "stream_resources"]
