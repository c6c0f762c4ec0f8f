"""Tiny real mlx-lm models with random float32 weights, one for each kind of caches.

The configurations are in tiny_models.json beside this file. The weights are scaled so
that logits depend on the whole text, and greedy texts have many different tokens.
"""

import importlib
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import base

# ModelArgs.from_dict inspects a signature for each key. Without this cache, the
# inspection takes half the time of a build.
vars(base)["inspect"] = SimpleNamespace(signature=cache(inspect.signature))

# Layers must outweigh the embedding in the residual stream, or a model with tied
# embeddings repeats its last token for ever.
_GAIN = 2.0
_EMBEDDING = 0.25
# Gemma multiplies its embeddings by sqrt(hidden size), here by sqrt(64) = 8.
_GEMMA_EMBEDDING = 0.04
# Deviation of norms, biases, decays and mixing weights from their initial values.
_NOISE = 0.4


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One configuration."""

    name: str  # key in the table, such as "llama(sliding)"
    module: str  # in mlx_lm.models
    # Many tokens in one forward have the same bits as one by one (Linux CPU wheel)
    bitwise: bool
    window: int | None  # of its sliding layers
    args: dict[str, Any]  # of ModelArgs.from_dict


def read_table(path: Path) -> dict[str, TinyModel]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {name: TinyModel(name=name, **row) for name, row in rows.items()}


# Number of models whose weights are kept, half a megabyte each.
MOST_KEPT = 200
_WEIGHTS: dict[str, list[tuple[str, mx.array]]] = {}

TINY_MODELS = read_table(Path(__file__).with_suffix(".json"))


def build(
    name: str, *, seed: int = 0, vocab: int | None = None, layers: int | None = None
) -> nn.Module:
    """Build a model of `TINY_MODELS`, with the same weights for the same arguments.

    This seeds the global random generator, so tests draw with their own keys.
    """
    tiny = TINY_MODELS[name]
    if layers is not None:
        text = tiny.args.get("text_config", tiny.args)
        text = {**text, "num_hidden_layers": layers}
        nested = {**tiny.args, "text_config": text}
        tiny = replace(tiny, args=nested if "text_config" in tiny.args else text)
    return build_tiny(tiny, seed=seed, vocab=vocab)


def build_tiny(
    tiny: TinyModel, *, seed: int = 0, vocab: int | None = None
) -> nn.Module:
    mx.random.seed(seed)  # The constructors draw from the global generator.
    model = structure(tiny, vocab=vocab)
    scale = embedding_scale(tiny.module)
    known = json.dumps([tiny.module, tiny.args, vocab, seed])
    keep_weights(model, known, lambda: randomise(model, embedding=scale))
    return model


def structure(tiny: TinyModel, *, vocab: int | None = None) -> nn.Module:
    """Make a model with the constructors' weights, which are not computed yet."""
    module = importlib.import_module(f"mlx_lm.models.{tiny.module}")
    args = module.ModelArgs.from_dict(_arguments(tiny, vocab))
    return cast(nn.Module, module.Model(args))


def keep_weights(model: nn.Module, known: str, draw: Callable[[], None]) -> None:
    """Give a model its random weights, drawn once for each key `known`.

    Drawing takes most of the time of a build. Each model gets array objects of its own,
    so a test that assigns into them does not change the kept ones. Until an assignment
    they share memory.
    """
    if known in _WEIGHTS:
        weights = [(path, mx.array(each)) for path, each in _WEIGHTS[known]]
        model.update(tree_unflatten(weights))
        mx.eval(model.parameters())  # else a forward would have more operations
        return
    draw()
    weights = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    _WEIGHTS[known] = [(path, mx.array(each)) for path, each in weights]
    # Another thread, such as a server's, cannot evaluate arrays of this thread.
    mx.eval([each for _, each in _WEIGHTS[known]])
    if len(_WEIGHTS) > MOST_KEPT:
        del _WEIGHTS[next(iter(_WEIGHTS))]


def embedding_scale(module: str) -> float:
    return _GEMMA_EMBEDDING if "gemma" in module else _EMBEDDING


def randomise(model: nn.Module, *, embedding: float) -> None:
    """Give every weight a random value from the global generator."""
    initial = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    tables = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    weights = [
        (path, _randomised(path, weight, embedding if path in tables else None))
        for path, weight in initial
    ]
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())


def _arguments(tiny: TinyModel, vocab: int | None) -> dict[str, Any]:
    args = {**tiny.args}
    if "time_step_limit" in args:  # JSON has no infinity
        args["time_step_limit"] = [float(limit) for limit in args["time_step_limit"]]
    if vocab is None:
        return args
    if "text_config" in args:
        args["text_config"] = {**args["text_config"], "vocab_size": vocab}
        return args
    if "vocab_size_per_layer_input" in args:
        args["vocab_size_per_layer_input"] = vocab
    return {**args, "vocab_size": vocab}


def _randomised(path: str, weight: mx.array, embedding: float | None) -> mx.array:
    """Return random values for a weight; `embedding` is the scale of an embedding."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight  # packed bits
    noise = mx.random.normal(weight.shape)
    if weight.ndim < 2 or not path.endswith("weight"):
        return weight + _NOISE * noise
    if embedding is not None:
        return noise * embedding
    # Depthwise convolutions are [channels, kernel, 1]; other weights have inputs last.
    inputs = weight.shape[-1] if weight.shape[-1] > 1 else weight.shape[-2]
    return noise * (_GAIN / math.sqrt(inputs))
