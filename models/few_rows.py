"""Linear layers that meet a few rows at once on CUDA, in a round.

A verify is a forward over two and more rows, and a batch's plain step one over as
many rows as it has. In it the linear layers of a model are asked by the kernels of
`cuda_products`, whatever model it is: a layer's instance gets a class that does so, as
mixers do (`instances`). Prompts, single rows, other dtypes and other ways to quantize
keep mlx's products, and so does every other device. While a graph is built, these
layers also submit what there is of it (`submit_in_parts`).

Results differ from mlx's by rounding, as cuBLASLt's differ from those of single rows.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.cuda_kernels import kernels_compile
from mlx_speculation.models.cuda_products import (
    HALVES,
    MOST_ROWS,
    product,
    product_of_four_bits,
)
from mlx_speculation.models.in_round import (
    cuda_serves,
    device_of_round,
    submit_in_parts,
)
from mlx_speculation.models.instances import Hook, derived, plain_class

_RANK = -1

Ask = Callable[[Any, mx.array], mx.array | None]


def half_product(layer: Any, x: mx.array) -> mx.array | None:
    """Return x @ layer.weight.T; None: mlx's own product serves better.

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
    return product(x, weight)


def quantized_product(layer: Any, x: mx.array) -> mx.array | None:
    """Return `half_product` of a quantized layer."""
    width, group, weight = x.shape[-1], layer.group_size, layer["weight"]
    if not 1 < x.size // width <= MOST_ROWS or weight.shape[-1] * 8 != width:
        return None  # that it has other bits is found out here too
    if layer.bits != 4 or layer.mode != "affine" or group not in (32, 64, 128):
        return None
    scales = layer["scales"]
    if x.dtype != scales.dtype or x.dtype not in HALVES:
        return None
    return product_of_four_bits(x, weight, scales, layer["biases"], group)


# The class, the method that multiplies, and what is asked in its place.
_LAYERS: dict[type[nn.Module], tuple[str, Ask]] = {
    nn.Linear: ("__call__", half_product),
    nn.QuantizedLinear: ("__call__", quantized_product),
    nn.Embedding: ("as_linear", half_product),
    nn.QuantizedEmbedding: ("as_linear", quantized_product),
}


@functools.cache
def _asking(kind: type[nn.Module], method: str, ask: Ask) -> type[nn.Module]:
    """Return a class whose `method` asks `ask` first, in a round."""
    usual = getattr(kind, method)

    def call(self: nn.Module, x: mx.array) -> mx.array:
        if device_of_round() != "cuda":
            plain: mx.array = usual(self, x)
            return plain
        found = ask(self, x)
        if found is None:
            found = usual(self, x)
        elif "bias" in self:
            found = found + self.bias
        if x.size > x.shape[-1]:  # steps of a draft are submitted one by one
            submit_in_parts(found)
        return found

    return derived(kind, {method: call})


def few_row_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer of a model that can be asked by the kernels, with its hook."""
    if not (cuda_serves() and kernels_compile()):
        return
    for _, module in model.named_modules():
        kind = plain_class(module)
        if kind in _LAYERS:
            yield module, Hook(_RANK, _asking, _LAYERS[kind])
