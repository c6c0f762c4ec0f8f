"""Attention in a round, in place of mlx-lm's function where another one is faster.

On CUDA that is the kernel of `cuda.attention` for a few rows, and
`cuda.padded_attention` for what cuDNN would plan anew; on an x86-64 CPU it is
`cpu.attention`. mlx-lm's own does everything else: sinks, quantized keys, other dtypes,
a single row of a single sequence.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_speculation.caches import asks_cudnn
from mlx_speculation.models.cpu import attention as blas_attention
from mlx_speculation.models.cuda import padded_attention
from mlx_speculation.models.cuda.attention import DIMENSIONS, attention
from mlx_speculation.models.cuda.matmul import HALVES

MOST_ROWS = 32


def serves(
    queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any, sinks: Any
) -> bool:
    """Whether the kernel does what mlx-lm's function does here, and better."""
    if sinks is not None or hasattr(cache, "bits"):
        return False
    batch, _, rows, dim = queries.shape
    bools = isinstance(mask, mx.array)
    alone = batch == rows == 1 and not bools  # which mlx has a kernel for
    if alone or rows > MOST_ROWS or dim not in DIMENSIONS:
        return False
    if bools and (mask.dtype != mx.bool_ or (mask.ndim > 2 and mask.shape[-3] != 1)):
        return False
    if values.shape != keys.shape or queries.shape[0] != keys.shape[0]:
        return False
    if queries.shape[1] % keys.shape[1] or keys.shape[-1] != dim:
        return False
    return queries.dtype in HALVES and queries.dtype == keys.dtype == values.dtype


def sizes_serve(
    queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any, sinks: Any
) -> bool:
    """Whether cuDNN is asked here, which plans for each new number of rows and keys."""
    if sinks is not None or hasattr(cache, "bits"):
        return False
    bools = isinstance(mask, mx.array)
    if bools and (mask.dtype != mx.bool_ or mask.shape[-1] != keys.shape[2]):
        return False
    same = queries.dtype == keys.dtype == values.dtype
    return same and (bools or queries.shape[2] > 1) and asks_cudnn(queries.dtype)


def products_serve(
    queries: mx.array, keys: Any, values: Any, cache: Any, sinks: Any
) -> bool:
    """Whether products of BLAS do what mlx-lm's function does here, and better."""
    if sinks is not None or hasattr(cache, "bits"):
        return False
    fewest = 1 if getattr(cache, "single_rows", False) else 2
    if queries.shape[2] < fewest or queries.shape[1] % keys.shape[1]:
        return False
    dtypes = {queries.dtype, keys.dtype, values.dtype}
    return dtypes == {mx.float32}


def attend_on_cuda(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Do what `mlx_lm.models.base.scaled_dot_product_attention` does, on CUDA."""
    if serves(queries, keys, values, cache, mask, sinks):
        return attention(queries, keys, values, scale, mask)
    if sizes_serve(queries, keys, values, cache, mask, sinks):
        return padded_attention.attention(queries, keys, values, scale, mask)
    found: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return found


def attend_on_x86(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Do what `mlx_lm.models.base.scaled_dot_product_attention` does, on x86-64."""
    if products_serve(queries, keys, values, cache, sinks):
        return blas_attention.attention(queries, keys, values, scale, mask)
    found: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return found
