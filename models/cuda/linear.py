"""Linear layers that meet a few rows at once on CUDA, in a round.

A verify is a forward over two and more rows, and a batch's plain step one over as
many rows as it has. In it the linear layers of a model are asked by the kernels of
`matmul`, whatever model it is: a layer's instance gets a class that does so, as
mixers do (`models.instance_hooks`). Prompts, single rows, other dtypes and other ways
to quantize keep mlx's products, and so does every other device.

Layers of one module whose names say that they are fed the same, such as queries, keys
and values, are multiplied together when the first of them is called; the others find
their result. One that was fed something else computes it by itself, and one that was
not asked for its result is left out from then on.

Results differ from mlx's by rounding, as cuBLASLt's differ from those of single rows.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed

from mlx_speculation.models.cuda.available import kernels_compile
from mlx_speculation.models.cuda.matmul import HALVES, MOST_ROWS, Weight, products
from mlx_speculation.models.instance_hooks import (
    OF_ROUNDS,
    Hook,
    derived,
    plain_class,
    unhooked,
)
from mlx_speculation.models.round_context import (
    cuda_serves,
    device_of_round,
    forward_of_round,
)

# Children of one module of mlx-lm that are mostly fed the same. Of other modules it is
# not known whether they change in place (x += y) what they have fed to one of them,
# which would not be seen here.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)

WeightOf = Callable[[Any, mx.array], Weight | None]


def half_weight(layer: Any, x: mx.array) -> Weight | None:
    """Return what the kernel is to multiply; None: mlx's own product serves better.

    Args:
        layer: a linear layer or an embedding.
        x: [..., k]
    """
    weight = layer["weight"]  # as an attribute it takes mlx's modules longer
    width = x.shape[-1]
    if not 1 < x.size // width <= MOST_ROWS or width % 32:
        return None
    if weight.shape[-1] != width:
        return None  # mlx says so
    if x.dtype != weight.dtype or x.dtype not in HALVES:
        return None
    return Weight((weight,), 0)


def quantized_weight(layer: Any, x: mx.array) -> Weight | None:
    """Return `half_weight` of a quantized layer."""
    width, group, weight = x.shape[-1], layer.group_size, layer["weight"]
    if not 1 < x.size // width <= MOST_ROWS or weight.shape[-1] * 8 != width:
        return None  # that it has other bits is found out here too
    if layer.bits != 4 or layer.mode != "affine" or group not in (32, 64, 128):
        return None
    scales = layer["scales"]
    if x.dtype != scales.dtype or x.dtype not in HALVES:
        return None
    return Weight((weight, scales, layer["biases"]), group)


class _Way(NamedTuple):
    """Method and weight by which a layer is multiplied."""

    method: str  # which multiplies
    weight_of: WeightOf  # what it multiplies by
    summed: bool = False  # whether products of all ranks of its group are added up


_LAYERS: dict[type[nn.Module], _Way] = {
    nn.Linear: _Way("__call__", half_weight),
    nn.QuantizedLinear: _Way("__call__", quantized_weight),
    nn.Embedding: _Way("as_linear", half_weight),
    nn.QuantizedEmbedding: _Way("as_linear", quantized_weight),
    # A rank's part of a layer.
    distributed.AllToShardedLinear: _Way("__call__", half_weight),
    distributed.QuantizedAllToShardedLinear: _Way("__call__", quantized_weight),
    distributed.ShardedToAllLinear: _Way("__call__", half_weight, summed=True),
    distributed.QuantizedShardedToAllLinear: _Way(
        "__call__", quantized_weight, summed=True
    ),
}


class _Together:
    """Layers that are multiplied with the one that is called first."""

    def __init__(self, others: Sequence[nn.Module]) -> None:
        self._others = list(others)
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    def class_of(self, kind: type[nn.Module]) -> type[nn.Module]:
        """Return the class for the layer that is called first."""
        if kind not in self._classes:  # the plain class, or with inner hooks
            self._classes[kind] = _asking_of(kind, self)
        return self._classes[kind]

    def leave_out(self) -> None:
        """Stop multiplying the other layers: a result was not used."""
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
    """Return a class whose method asks for the kernel first, in a round."""
    method, weight_of, summed = _LAYERS[unhooked(kind)]
    usual = getattr(kind, method)

    def call(self: nn.Module, x: mx.array) -> mx.array:
        # Steps of a draft are single rows, for which there is no kernel.
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
    """Yield layers of one kind that are mostly fed the same."""
    for _, module in model.named_modules():
        if not plain_class(module).__module__.startswith("mlx_lm.models."):
            continue
        for names in _TOGETHER:
            result = [module[name] for name in names if name in module]
            kinds = {plain_class(each) for each in result}
            if len(result) > 1 and len(kinds) == 1 and kinds < set(_LAYERS):
                yield result


def few_row_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer of a model that can be asked by the kernels, with its hook."""
    if not (cuda_serves() and kernels_compile()):
        return
    firsts = {id(first): _Together(more) for first, *more in _groups(model)}
    for _, module in model.named_modules():
        if plain_class(module) not in _LAYERS:
            continue
        together = firsts.get(id(module))
        make = _asking if together is None else together.class_of
        yield module, Hook(OF_ROUNDS, make)
