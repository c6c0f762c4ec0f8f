"""Dispatch of a round's operations between mlx's own and the rooms' ops.

It replaces functions that mlx-lm's layers call, while a round runs and in its thread
alone. It knows shapes and devices; it does not know drafters, caches or tokens, nor
which rooms there are.
"""

from mlx_speculation.models.ops.dispatch import (
    compiled_steps,
    stream_resources,
)

__all__ = ["compiled_steps", "stream_resources"]
