"""Attention of a few rows on CUDA, in a round, for models that ask mlx-lm's function.

mlx-lm's attention layers call `scaled_dot_product_attention` of `mlx_lm.models.base` by
its global name. A hooked layer runs its own code, made again with a function in that
name that asks the kernel of `cuda_attention` where it serves, and mlx-lm's elsewhere:
for sinks, quantized keys, other dtypes and head dimensions, a single row of a single
sequence, and outside of rounds.
"""

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_speculation.models.absorbed import ATTENTIONS
from mlx_speculation.models.cuda_attention import DIMENSIONS, attention
from mlx_speculation.models.cuda_kernels import kernels_compile
from mlx_speculation.models.cuda_products import HALVES
from mlx_speculation.models.in_round import cuda_serves, in_round_on_cuda
from mlx_speculation.models.instances import Hook, derived, made_again, plain_class

MOST_ROWS = 32
_NAME = "scaled_dot_product_attention"
_RANK = -1


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


def attend(
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
    found: mx.array = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return found


@functools.cache
def _asking(kind: Any) -> type[nn.Module]:
    """Return a class that asks `attend`, in a round."""
    original: FunctionType = kind.__call__
    theirs = original.__globals__
    again = made_again(original, _NAME, attend)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current: Any = kind.__call__
        ours = current is original and theirs[_NAME] is scaled_dot_product_attention
        if in_round_on_cuda() and ours:
            return again(self, *args, **kwargs)
        return current(self, *args, **kwargs)

    return derived(kind, {"__call__": call})


def attention_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer whose own code calls mlx-lm's function, with its hook."""
    if not (cuda_serves() and kernels_compile()):
        return
    for _, module in model.named_modules():
        kind = plain_class(module)
        method = kind.__call__
        if (kind.__module__, kind.__name__) in ATTENTIONS:
            continue  # over latents, which have a way of their own
        if (
            not isinstance(method, FunctionType)
            or _NAME not in method.__code__.co_names
        ):
            continue
        if method.__globals__.get(_NAME) is scaled_dot_product_attention:
            yield module, Hook(_RANK, _asking)
