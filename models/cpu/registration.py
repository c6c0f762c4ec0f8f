"""Operations of `models/cpu`, as one `DeviceOps`.

Round ops serve only if mlx uses OpenBLAS, where rows differ from single rows by
rounding anyway. Drafts can be compiled on any CPU.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_speculation.models.cpu import attention, exp
from mlx_speculation.models.cpu.compiled_draft import compiled_steps
from mlx_speculation.models.device_ops import DeviceOps, RoundOp
from mlx_speculation.models.round_context import device_of_round, x86_serves

# With fewer elements mlx's own functions are as fast.
_FEWEST = 2048


def serves() -> bool:
    """Return whether round ops serve here; if so, compile them now."""
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


def _for_many(
    ours: Callable[..., mx.array], theirs: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    """Return a function that calls `ours` for many float32 values, else `theirs`.

    It calls `ours` for several rows, in arrays of one shape, in a round on x86-64.
    """

    def call(*arrays: mx.array) -> mx.array:
        first = arrays[0]
        many = first.size >= _FEWEST and first.size > first.shape[-1]
        same = all(a.dtype == mx.float32 and a.shape == first.shape for a in arrays)
        ask = many and same and device_of_round() == "x86"
        return (ours if ask else theirs)(*arrays)

    return call


def _precise_swiglu(_: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    return exp.swiglu(gate, x)


def _round_ops() -> dict[str, RoundOp]:
    swiglu, precise = activations.swiglu, activations.precise_swiglu
    of_nn = {
        name: _for_many(getattr(exp, name), getattr(nn, name))
        for name in ("silu", "gelu_approx")
    }
    return {
        "scaled_dot_product_attention": RoundOp(scaled_dot_product_attention, attend),
        "swiglu": RoundOp(swiglu, _for_many(exp.swiglu, swiglu)),
        "precise_swiglu": RoundOp(precise, _for_many(_precise_swiglu, precise)),
        "nn": RoundOp(nn, SimpleNamespace(**{**vars(nn), **of_nn}), frozenset(of_nn)),
    }


OPS = DeviceOps(
    device="x86",
    serves=serves,
    round_ops=_round_ops(),
    activations=frozenset({"nn", "swiglu", "precise_swiglu"}),
    compile_draft=compiled_steps,
)
