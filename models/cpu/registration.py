"""Operations of `models/cpu`, as one `DeviceOps`.

With the attention of `models/cpu` a row's rounding depends on the other rows of the
forward. So it is used only with OpenBLAS, where this holds for mlx's own products too.
Drafts can be compiled on any CPU.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_speculation.models.cpu import attention, exp
from mlx_speculation.models.cpu.compiled_draft import compiled_steps
from mlx_speculation.models.device_ops import DeviceOps
from mlx_speculation.models.round_context import x86_serves


def serves() -> bool:
    """Return whether attention is supported here; if so, compile `exp`."""
    if not x86_serves():
        return False
    exp.compile_here()
    return True


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute `mlx_lm.models.base.scaled_dot_product_attention` on x86-64."""
    if attention.serves(queries, keys, values, cache, sinks):
        return attention.attention(queries, keys, values, scale, mask)
    result: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return result


OPS = DeviceOps(
    device="x86",
    serves=serves,
    attend=attend,
    compile_draft=compiled_steps,
)
