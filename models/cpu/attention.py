"""Attention in float32 on an x86-64 CPU, by matrix products of BLAS.

On such a CPU, mlx's own attention spends most of its time outside of the matrix
products. Here:

- The softmax is vectorized, see `exponentials`. Its division by the sum comes after the
  product with the values, on `value dim` numbers a row instead of n.
- Query heads that share keys are computed in one product.
- Many rows are computed in blocks, whose results stay in the processor's caches. With a
  causal mask a block omits keys that none of its rows see.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.models.cpu.exp import exponentials

# Blocks of 32 to 128 rows take the same time, blocks of 256 up to a fifth more.
ROWS_AT_ONCE = 64
_LOWEST = -3.4028234663852886e38  # of float32; mlx's score where a bool mask is False


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Compute `mx.fast.scaled_dot_product_attention` in float32.

    Args:
        queries: [batch, heads, rows, dim].
        keys: [batch, key heads, n, dim].
        values: [batch, key heads, n, value dim].
        scale: the factor of the products of queries and keys.
        mask: None, "causal", or an array: of bool, or of float32 to add to the scores.
            Its shape is [rows, n], with or without axes for batch and heads in front.

    Returns:
        [batch, heads, rows, value dim].
    """
    rows, count = queries.shape[2], keys.shape[2]
    if rows <= ROWS_AT_ONCE:
        return _block(queries, keys, values, scale, mask)
    blocks = []
    for start in range(0, rows, ROWS_AT_ONCE):
        stop, seen, part = min(start + ROWS_AT_ONCE, rows), count, mask
        if isinstance(mask, str):
            seen = count - rows + stop
        elif mask is not None and mask.shape[-2] > 1:
            part = mask[..., start:stop, :]
        blocks.append(
            _block(
                queries[:, :, start:stop],
                keys[:, :, :seen],
                values[:, :, :seen],
                scale,
                part,
            )
        )
    return mx.concatenate(blocks, axis=2)


def _block(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any
) -> mx.array:
    """Return the attention of one block of rows."""
    batch, heads, rows, dim = queries.shape
    shared, count = keys.shape[1:3]
    together = (batch, shared, heads // shared * rows)
    scores = (queries * scale).reshape(*together, dim) @ keys.swapaxes(-1, -2)
    if mask is not None:
        scores = scores.reshape(batch, heads, rows, count)
        if isinstance(mask, str):
            mask = mx.tri(rows, count, k=count - rows, dtype=mx.bool_)
        if mask.dtype == mx.bool_:
            scores = mx.where(mask, scores, _LOWEST)
        else:
            scores = scores + mask
        scores = scores.reshape(*together, count)
    weights = exponentials(scores)
    summed = weights @ values / weights.sum(axis=-1, keepdims=True)
    return summed.reshape(batch, heads, rows, values.shape[-1])


def serves(queries: mx.array, keys: Any, values: Any, cache: Any, sinks: Any) -> bool:
    """Return whether `attention` takes these arguments and is faster than mlx's own."""
    if sinks is not None or hasattr(cache, "bits"):
        return False
    fewest = 1 if getattr(cache, "single_rows", False) else 2
    if queries.shape[2] < fewest or queries.shape[1] % keys.shape[1]:
        return False
    dtypes = {queries.dtype, keys.dtype, values.dtype}
    return dtypes == {mx.float32}
