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
every floating point type. Knows the layout of mlx-lm's qwen3 alone.

An EAGLE-3 head of the small model keeps its size: it reads the t copies of each state
as their mean, and gets an embedding of its own, the small model's.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.utils import dequantize_model

from mlx_speculation.engine import EagleDraft
from mlx_speculation.models import load_eagle_head


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


def grow(
    model: qwen3.Model, growth: Growth, dtype: mx.Dtype = mx.bfloat16
) -> qwen3.Model:
    """Return a larger model of the same function, its parameters evaluated.

    Raises:
        ValueError: the width is no power of two, or there are fewer layers.
    """
    args, width = model.args, growth.width
    if width < 1 or width & (width - 1) or growth.layers < args.num_hidden_layers:
        raise ValueError(
            f"the growth is {growth}, and the width has to be a power of two and the "
            f"layers at least {args.num_hidden_layers}"
        )
    small = _dense(model)
    larger = qwen3.Model(
        replace(
            args,
            hidden_size=args.hidden_size * width,
            intermediate_size=args.intermediate_size * width,
            num_attention_heads=args.num_attention_heads * width,
            num_key_value_heads=args.num_key_value_heads * width,
            num_hidden_layers=growth.layers,
        )
    )
    for name, value in small.items():
        _set(larger, name, _wider(name, value, width).astype(dtype))
    last = args.num_hidden_layers - 1
    for layer in range(args.num_hidden_layers, growth.layers):
        for name, value in small.items():
            prefix = f"model.layers.{last}."
            if name.startswith(prefix):
                own = name.removeprefix(prefix)
                more = _wider(name, value, width).astype(dtype)
                if own in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                    more = mx.zeros_like(more)
                _set(larger, f"model.layers.{layer}.{own}", more)
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
    embedding = _dense(small)["model.embed_tokens.weight"]
    head.embed_tokens = nn.Embedding(*embedding.shape)
    head.embed_tokens.weight = embedding
    head.set_dtype(dtype)
    mx.eval(head.parameters())
    return EagleDraft(larger, head, loaded.layers)


def parameters_of(model: nn.Module) -> int:
    """Return how many weights a model has, those of quantized layers unpacked."""
    total = 0
    for _, module in model.named_modules():
        own = [v for v in module.values() if isinstance(v, mx.array)]
        packed = "scales" in module
        for value in own:
            words = packed and value.dtype == mx.uint32
            total += value.size * (32 // module.bits if words else 1)
    return total


def _dense(model: qwen3.Model) -> dict[str, mx.array]:
    """Return the parameters in float32, not quantized, and leave the model alone."""
    stored: Any = tree_flatten(model.parameters())
    dense: nn.Module = model
    if any(".scales" in name for name, _ in stored):
        copy = qwen3.Model(model.args)
        config = next(
            {"group_size": module.group_size, "bits": module.bits}
            for _, module in model.named_modules()
            if "scales" in module
        )
        nn.quantize(copy, **config)
        copy.update(model.parameters())
        copy.set_dtype(mx.float32)
        dense = dequantize_model(copy)
    found: Any = tree_flatten(dense.parameters())
    return {name: value.astype(mx.float32) for name, value in found}


def _wider(name: str, value: mx.array, width: int) -> mx.array:
    """Return a parameter of the wider model."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return value  # inside of a head
    if name == "model.norm.weight":
        return mx.tile(value, [width]) / width
    if name == "model.embed_tokens.weight":
        return mx.tile(value, [1, width])
    if value.ndim == 1:
        return mx.tile(value, [width])
    return mx.tile(value, [width, width]) / width


def _set(model: nn.Module, name: str, value: mx.array) -> None:
    """Put a parameter in its place, which must have its shape."""
    *path, last = name.split(".")
    module: Any = model
    for part in path:
        module = module[int(part)] if part.isdigit() else module[part]
    if module[last].shape != value.shape:
        raise ValueError(f"{name} is {value.shape} instead of {module[last].shape}")
    mx.eval(value)
    module[last] = value
