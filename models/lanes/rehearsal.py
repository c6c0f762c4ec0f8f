"""Forwards that are run and rolled back, so that kernels and plans exist afterwards.

On CUDA, kernels are loaded at their first use, and cuDNN plans attention for each new
pair of row count and key count (`caches/types/padded_kv.py`), unless a kernel of
`models/cuda` supports the head dimension.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.caches import asks_cudnn, leaves, whole_steps
from mlx_speculation.models.lanes.single import Lane
from mlx_speculation.models.ops.dispatch import attention_dims
from mlx_speculation.models.shape_buckets import row_size


def rehearse(lane: Lane, rows: int, before: int = 0) -> None:
    """Feed `before` tokens and then `rows` tokens, and roll back."""
    with lane.begin() as lane_round:  # leaving it without a commit rolls back
        for count in (before, rows):
            if count:
                mx.eval(lane_round.forward(mx.zeros(count, mx.uint32)))


def plans_by_keys(caches: Sequence[Any]) -> bool:
    """Return whether attention over these caches is planned for each number of keys."""
    dims = attention_dims()
    shown = [getattr(leaf, "keys", None) for _, leaf in leaves(caches)]
    arrays = [keys for keys in shown if isinstance(keys, mx.array)]
    return any(asks_cudnn(k.dtype) and k.shape[-1] not in dims for k in arrays)


def shape_of_round(context: int, rows: int, *, by_keys: bool) -> tuple[int, int]:
    """Return the numbers of rows and keys that a round is compiled or planned for.

    `context` is the number of tokens in the caches before the round, and `rows` the
    number of positions that are fed. The number of keys is 0 without `by_keys`.
    """
    return row_size(rows), whole_steps(context + rows) if by_keys else 0
