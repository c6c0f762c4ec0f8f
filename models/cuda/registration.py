"""The operations of `models/cuda` as one `DeviceOps`."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_speculation.models.cuda import attention, gated_delta, padded_attention
from mlx_speculation.models.cuda.available import kernels_compile
from mlx_speculation.models.cuda.linear import few_row_hooks
from mlx_speculation.models.device_ops import DeviceOps, RunBlock
from mlx_speculation.models.round_context import cuda_serves, device_of_round


def serves() -> bool:
    """Return whether rounds run on CUDA here, and kernels compile."""
    return cuda_serves() and kernels_compile()


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute attention on CUDA, like mlx-lm's `scaled_dot_product_attention`.

    A kernel computes a few rows. More rows are padded for cuDNN. mlx-lm's own function
    computes the rest: sinks, quantized keys, other dtypes, a single row.
    """
    if attention.serves(queries, keys, values, cache, mask, sinks):
        whole = attention.shows_whole_buffer(keys, cache)
        return attention.attention(queries, keys, values, scale, mask, contiguous=whole)
    if padded_attention.serves(queries, keys, values, cache, mask, sinks):
        return padded_attention.attention(queries, keys, values, scale, mask)
    result: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return result


def gated_delta_kernel(q: mx.array, v: mx.array) -> RunBlock | None:
    """Return the kernel for these shapes in a round on CUDA; None: there is none."""
    served = device_of_round() == "cuda" and kernels_compile()
    return gated_delta.run_steps if served and gated_delta.serves(q, v) else None


OPS = DeviceOps(
    device="cuda",
    serves=serves,
    attend=attend,
    hooks=few_row_hooks,
    attention_dims=frozenset(attention.DIMENSIONS),
    gated_delta=gated_delta_kernel,
)
