"""Hooks with which linear layers in a round use the few-row kernels of `matmul`.

A forward over a draft has at least two rows, and a batch's plain step has one row for
each text. In these forwards the linear layers of any model use the kernels, for 2 to
`MOST_ROWS` rows in float16 or bfloat16. Weights have the same dtype, or affine
quantization with 4 bits. mlx computes all other products.

Layers of one module with the same input, such as queries, keys and values, are
multiplied together when the first of them is called. The layers' names show that the
input is the same. The other layers take their results when they are called, or compute
their own products if their input is another array. If a result is not taken, its group
is no longer multiplied together.

Results differ from mlx's by rounding.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed

from mlx_speculation.models.cuda.available import kernels_compile
from mlx_speculation.models.cuda.matmul import HALVES, MOST_ROWS, Weight, products
from mlx_speculation.models.instance_hooks import Hook, derived, plain_class, unhooked
from mlx_speculation.models.round_context import (
    cuda_serves,
    device_of_round,
    forward_of_round,
)

_RANK = -1  # nearer to the plain class than the hook of `position_table`

# Names of layers that mostly have the same input, if they are in one module of mlx-lm.
# Modules that are not mlx-lm's might change the input in place (x += y) between two
# calls, unnoticed.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)

WeightOf = Callable[[Any, mx.array], Weight | None]


def half_weight(layer: Any, x: mx.array) -> Weight | None:
    """Return a layer's or embedding's weight for the kernel; None: mlx multiplies."""
    weight = layer["weight"]  # faster than layer.weight
    width = x.shape[-1]
    if not 1 < x.size // width <= MOST_ROWS or width % 32:
        return None
    if weight.shape[-1] != width:
        return None
    if x.dtype != weight.dtype or x.dtype not in HALVES:
        return None
    return Weight((weight,), 0)


def quantized_weight(layer: Any, x: mx.array) -> Weight | None:
    """Return the weight for the kernel like `half_weight`, for a quantized layer."""
    width, group, weight = x.shape[-1], layer.group_size, layer["weight"]
    if not 1 < x.size // width <= MOST_ROWS or weight.shape[-1] * 8 != width:
        return None
    if layer.bits != 4 or layer.mode != "affine" or group not in (32, 64, 128):
        return None
    scales = layer["scales"]
    if x.dtype != scales.dtype or x.dtype not in HALVES:
        return None
    return Weight((weight, scales, layer["biases"]), group)


class _Way(NamedTuple):
    """The way in which a kind of layer multiplies."""

    method: str  # the name of the method that multiplies
    weight_of: WeightOf
    summed: bool = False  # whether the products of all ranks are added


_LAYERS: dict[type[nn.Module], _Way] = {
    nn.Linear: _Way("__call__", half_weight),
    nn.QuantizedLinear: _Way("__call__", quantized_weight),
    nn.Embedding: _Way("as_linear", half_weight),
    nn.QuantizedEmbedding: _Way("as_linear", quantized_weight),
    distributed.AllToShardedLinear: _Way("__call__", half_weight),
    distributed.QuantizedAllToShardedLinear: _Way("__call__", quantized_weight),
    distributed.ShardedToAllLinear: _Way("__call__", half_weight, summed=True),
    distributed.QuantizedShardedToAllLinear: _Way(
        "__call__", quantized_weight, summed=True
    ),
}


class _Together:
    """The layers that are multiplied together with the first layer of a group."""

    def __init__(self, others: Sequence[nn.Module]) -> None:
        self._others = list(others)
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    def class_of(self, kind: type[nn.Module]) -> type[nn.Module]:
        """Return the class for the layer that is called first."""
        if kind not in self._classes:
            self._classes[kind] = _asking_of(kind, self)
        return self._classes[kind]

    def leave_out(self) -> None:
        """Stop multiplying the other layers; called after a result was not used."""
        self._others = []

    def product(self, weight: Weight, x: mx.array, weight_of: WeightOf) -> mx.array:
        """Return the product of the first layer; keep the products of the others."""
        others = [(layer, weight_of(layer, x)) for layer in self._others]
        weights = [w for _, w in others if w is not None and w.group == weight.group]
        if len(weights) < len(others):
            weights, others = [], []
        first, *more = products(x, [weight, *weights])
        kept = forward_of_round().kept
        for (layer, _), result in zip(others, more, strict=True):
            kept[id(layer)] = (x, result, self.leave_out)
        return first


_ALONE = _Together(())


def _asking_of(kind: type[nn.Module], together: _Together) -> type[nn.Module]:
    """Return a class whose method uses the kernel in a round if it can."""
    method, weight_of, summed = _LAYERS[unhooked(kind)]
    usual = getattr(kind, method)

    def call(self: nn.Module, x: mx.array) -> mx.array:
        # A drafter's steps feed single rows, for which there is no kernel.
        if x.size == x.shape[-1] or device_of_round() != "cuda":
            plain: mx.array = usual(self, x)
            return plain
        result = forward_of_round().take(id(self), x)
        if result is None:
            weight = weight_of(self, x)
            if weight is not None:
                result = together.product(weight, x, weight_of)
        if result is None:
            result = usual(self, x)
        else:
            if summed:
                result = mx.distributed.all_sum(result, group=self.group)
            if "bias" in self:
                result = result + self.bias
        return result

    return derived(kind, {method: call})


@functools.cache
def _asking(kind: type[nn.Module]) -> type[nn.Module]:
    return _asking_of(kind, _ALONE)


def _groups(model: nn.Module) -> Iterator[list[nn.Module]]:
    for _, module in model.named_modules():
        if not plain_class(module).__module__.startswith("mlx_lm.models."):
            continue
        for names in _TOGETHER:
            result = [module[name] for name in names if name in module]
            kinds = {plain_class(each) for each in result}
            if len(result) > 1 and len(kinds) == 1 and kinds < set(_LAYERS):
                yield result


def few_row_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer of a model that can use the kernels, with its hook."""
    if not (cuda_serves() and kernels_compile()):
        return
    firsts = {id(first): _Together(more) for first, *more in _groups(model)}
    for _, module in model.named_modules():
        if plain_class(module) not in _LAYERS:
            continue
        together = firsts.get(id(module))
        make = _asking if together is None else together.class_of
        yield module, Hook(_RANK, make)
