"""Makes a small trained model large without changing what it says.

For figures at the cost of 1 to 8 billion parameters where no such weights can be had.
The grown model is the same function, so that acceptance is the small model's up to
rounding, while every product costs what its size costs. Nothing it says is better.

Wider by tiling, with t copies of everything: the residual stream x becomes [x x ... x],
which every RMS norm leaves alone. A matrix W [out, in] becomes t x t blocks W / t, so
that its output is tiled too; heads are tiled with their keys and values, hence no head
changes. The final norm is divided by t, because the tied output layer sums t copies.

Deeper by layers whose output projections are zero: they add exactly nothing, and cost
what a layer costs.

Exact in float32 up to the order of sums; t is a power of two, so W / t is exact in
every floating point type. This module knows the layout of mlx-lm's qwen3;
growing_hybrid.py has that of qwen3_5.

An EAGLE-3 head of the small model keeps its size: it reads the t copies of each state
as their mean, and gets an embedding of its own, the small model's.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.utils import dequantize_model

from mlx_speculation.engine import EagleDraft
from mlx_speculation.models.eagle import load_eagle_head

QUANTIZED_GROUP = 64


@dataclass(frozen=True, slots=True)
class Growth:
    """How much larger.

    Attributes:
        width: copies of the residual stream, heads and hidden units; a power of two.
        layers: of the grown model, at least as many as there are.
    """

    width: int
    layers: int


SHAPES = {
    "as it is": Growth(width=1, layers=6),
    "1B": Growth(width=4, layers=22),
    "8B": Growth(width=8, layers=44),
}
# Of the bundled draft: 6 % of the 8B shape's parameters, as usual draft models have.
DRAFT_SHAPES = {
    "0.5B": Growth(width=8, layers=13),
}

# The parameter of the wider model: from its name, the small one, and the width.
Wider = Callable[[str, mx.array, int], mx.array]


@dataclass(frozen=True, slots=True)
class Layout:
    """What growing has to know of one small model.

    Attributes:
        larger: makes the larger model, whose weights are not looked at.
        wider: makes a parameter of it.
        like: the layer of the small model that a further layer is made from.
        outputs: the parameters of a layer that add to the residual stream.
    """

    larger: Callable[[Growth], nn.Module]
    wider: Wider
    like: Callable[[int], int]
    outputs: tuple[str, ...]


def grow(
    model: nn.Module,
    growth: Growth,
    dtype: mx.Dtype = mx.bfloat16,
    *,
    bits: int | None = None,
    layout: Layout | None = None,
) -> Any:
    """Return a larger model of the same function, its parameters evaluated.

    One tensor at a time, so that the most memory is little more than its own.

    Args:
        model: the small one, which is left alone.
        growth: how much larger.
        dtype: of the parameters that are not quantized.
        bits: quantize it, each layer as soon as it is made; None: do not.
        layout: the small model's; by default that of qwen3.

    Raises:
        ValueError: the width is no power of two, or there are fewer layers.
    """
    layout = layout or _qwen3(model)
    width, count = growth.width, len(model.layers)
    if width < 1 or width & (width - 1) or growth.layers < count:
        raise ValueError(
            f"the growth is {growth}, and the width has to be a power of two and the "
            f"layers at least {count}"
        )
    small, of_layer = _by_layer(dense_parameters(model))
    larger: Any = layout.larger(growth)
    for name, value in small.items():
        put(larger, name, layout.wider(name, value, width), dtype)
    for index, layer in enumerate(larger.layers):
        source = index if index < count else layout.like(index)
        for name, value in of_layer[source].items():
            more = layout.wider(name, value, width)
            if index >= count and name in layout.outputs:
                more = mx.zeros_like(more)
            put(layer, name, more, dtype)
        quantize(layer, bits)
    quantize(larger, bits)  # what is in no layer
    larger.eval()
    return larger


def fit_head(
    folder: Path, small: qwen3.Model, larger: qwen3.Model, dtype: mx.Dtype = mx.bfloat16
) -> EagleDraft:
    """Return the small model's EAGLE-3 head as a draft of the model grown from it."""
    loaded = load_eagle_head(folder, small)
    head: Any = dequantize_model(loaded.head)
    width = larger.args.hidden_size // small.args.hidden_size
    parts = mx.split(head.fc.weight, len(loaded.layers), axis=1)
    read = mx.concatenate([mx.tile(part, [1, width]) / width for part in parts], axis=1)
    outputs, inputs = read.shape
    head.fc = nn.Linear(inputs, outputs, bias=False)
    head.fc.weight = read
    embedding = dense_parameters(small)["model.embed_tokens.weight"]
    head.embed_tokens = nn.Embedding(*embedding.shape)
    head.embed_tokens.weight = embedding
    head.set_dtype(dtype)
    mx.eval(head.parameters())
    return EagleDraft(larger, head, loaded.layers)


def parameters_of(model: nn.Module) -> int:
    """Return how many weights a model has, those of quantized layers unpacked."""
    total = 0
    for _, module in model.named_modules():
        for name, value in module.items():
            if not isinstance(value, mx.array):
                continue
            if "scales" in module and name == "weight":
                total += value.size * 32 // module.bits
            elif "scales" not in module or name == "bias":
                total += value.size
    return total


def dense_parameters(module: nn.Module) -> dict[str, mx.array]:
    """Return the parameters in float32, not quantized, and leave the module alone."""
    stored: Any = tree_flatten(module.parameters())
    found = {name: value.astype(mx.float32) for name, value in stored}
    for path, layer in module.named_modules():
        if "scales" in layer:
            scales, biases = found.pop(f"{path}.scales"), found.pop(f"{path}.biases")
            found[f"{path}.weight"] = mx.dequantize(
                layer.weight, scales, biases, layer.group_size, layer.bits
            )
    return found


def tiled(value: mx.array, width: int) -> mx.array:
    """Return a vector tiled, or a matrix as t x t blocks of its t-th part."""
    if value.ndim == 1:
        return mx.tile(value, [width])
    return mx.tile(value, [width, width]) / width


def put(module: nn.Module, name: str, value: mx.array, dtype: mx.Dtype) -> None:
    """Put a parameter in its place, which must have its shape, and evaluate it."""
    *path, last = name.split(".")
    owner: Any = module
    for part in path:
        owner = owner[int(part)] if part.isdigit() else owner[part]
    if owner[last].shape != value.shape:
        raise ValueError(f"{name} is {value.shape} instead of {owner[last].shape}")
    # Logarithms of decays stay what they are in released checkpoints.
    value = value.astype(mx.float32 if last == "A_log" else dtype)
    mx.eval(value)
    owner[last] = value


def quantize(module: nn.Module, bits: int | None) -> None:
    """Quantize the layers in a module that are not yet, and let go of what they were.

    Args:
        module: what holds them.
        bits: of a weight; None: leave them.
    """
    if bits is not None:
        nn.quantize(module, group_size=QUANTIZED_GROUP, bits=bits)
        mx.eval(module.parameters())


def _qwen3(model: Any) -> Layout:
    args = model.args

    def larger(growth: Growth) -> nn.Module:
        width = growth.width
        more = replace(
            args,
            hidden_size=args.hidden_size * width,
            intermediate_size=args.intermediate_size * width,
            num_attention_heads=args.num_attention_heads * width,
            num_key_value_heads=args.num_key_value_heads * width,
            num_hidden_layers=growth.layers,
        )
        return qwen3.Model(more)

    last = args.num_hidden_layers - 1
    outputs = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    return Layout(larger, _wider, lambda index: last, outputs)


def _by_layer(
    parameters: dict[str, mx.array],
) -> tuple[dict[str, mx.array], dict[int, dict[str, mx.array]]]:
    """Return those in no layer by their names, and others by layer and name in it."""
    others: dict[str, mx.array] = {}
    of_layer: dict[int, dict[str, mx.array]] = {}
    for name, value in parameters.items():
        found = re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.*)", name)
        if found is None:
            others[name] = value
        else:
            of_layer.setdefault(int(found[1]), {})[found[2]] = value
    return others, of_layer


def _wider(name: str, value: mx.array, width: int) -> mx.array:
    """Return a parameter of a wider qwen3."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return value  # inside of a head
    if name == "model.norm.weight":
        return mx.tile(value, [width]) / width
    if name == "model.embed_tokens.weight":
        return mx.tile(value, [1, width])
    return tiled(value, width)
