"""Attention padded to a few sizes, since cuDNN is slow at each new size.

On CUDA, in half precision, cuDNN takes about 40 ms to plan attention for each new pair
of row count and key count (`caches/types/padded_kv.py`). A draft model meets many
pairs, since a prompt can have any length. With padding it meets few:

    rows     1 2 3 4 6 8 12 16 24 32 48 ... 1,536 2,048      see `row_size`
    keys     512 1,024 1,536 ... 4,096 4,608 ...             see `whole_steps`

The padding is zeros. If the mask is causal, and the number of keys before the rows is 0
or one of the table, as many keys as rows are added. The mask stays causal, and only
added rows see added keys. Otherwise a bool mask hides the added keys. On an H200,
attention with a bool mask took 3 to 7 times as long as with a causal one.

Only drafts and rounds use this: their logits are allowed to differ from mlx's by
rounding.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.caches import asks_cudnn, whole_steps
from mlx_speculation.models.round_context import forward_of_round
from mlx_speculation.models.shape_buckets import row_size


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Compute `mx.fast.scaled_dot_product_attention` on padded inputs.

        queries    [batch, heads, rows, dim]
        keys       [batch, key heads, n, dim]
        values     [batch, key heads, n, value dim]

    `mask` is None, "causal" or bool [rows, n], perhaps with axes for batch and heads in
    front.
    """
    rows, count = queries.shape[2], keys.shape[2]
    more_rows, before = row_size(rows) - rows, count - rows
    causal = isinstance(mask, str) and whole_steps(before) == before
    more_keys = more_rows if causal else whole_steps(count) - count
    if more_rows or more_keys:
        if not causal:
            mask = _filled(mask, rows, count, more_rows, more_keys)
        queries = mx.pad(queries, [(0, 0), (0, 0), (0, more_rows), (0, 0)])
        room = [(0, 0), (0, 0), (0, more_keys), (0, 0)]
        keys, values = mx.pad(keys, room), mx.pad(values, room)
    result: mx.array = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask
    )
    return result[:, :, :rows] if more_rows else result


def _filled(mask: Any, rows: int, count: int, more_rows: int, more_keys: int) -> Any:
    """Return the padded mask, bool [..., rows, keys], which hides the added keys.

    Added rows see the first key, so that their results are not NaN.
    """
    done = forward_of_round().masks
    key = (id(mask), rows, count)
    if key not in done:
        if mask is None:
            seen = mx.ones((rows, count), mx.bool_)
        elif isinstance(mask, str):
            seen = mx.tri(rows, count, k=count - rows, dtype=mx.bool_)
        else:
            seen = mx.broadcast_to(mask, (*mask.shape[:-2], rows, count))
        before = [(0, 0)] * (seen.ndim - 2)
        seen = mx.pad(seen, [*before, (0, 0), (0, more_keys)])
        first = mx.arange(count + more_keys) == 0
        added = (*seen.shape[:-2], more_rows, count + more_keys)
        both = [seen, mx.broadcast_to(first, added)]
        # The mask is kept too, so that no other object gets its id.
        done[key] = (mask, mx.concatenate(both, axis=-2))
    return done[key][1]


def serves(
    queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any, sinks: Any
) -> bool:
    """Return whether cuDNN computes this attention, with a plan for each new size."""
    if sinks is not None or hasattr(cache, "bits"):
        return False
    bools = isinstance(mask, mx.array)
    if bools and (mask.dtype != mx.bool_ or mask.shape[-1] != keys.shape[2]):
        return False
    same = queries.dtype == keys.dtype == values.dtype
    return same and (bools or queries.shape[2] > 1) and asks_cudnn(queries.dtype)
