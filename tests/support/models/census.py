"""Every architecture of mlx_lm.models, as a tiny model with random weights.

The table is census.json beside this file:

    common      arguments for every model, and for its text_config if it has one
    built       module -> measurements and further arguments:
        caches      result of make_prompt_cache, such as "3 ArraysCache, 1 KVCache"
        layers      len(model.layers); null: the model has no such attribute
        window      the size of its rotating caches; null: it has none
        bitwise     whether the logits of four tokens in one forward equal those of
                    four forwards of one token, bit for bit, past the window, on
                    the Linux CPU wheel in float32
        unequal     the reason, if drafts cannot be verified
        args        further arguments of ModelArgs
        tiny        instead of args: name of a row of tiny_models.json, which
                    tests/engine/test_text_is_unchanged.py tests
    not_built   module -> the reason, and a part of the error that proves it
"""

import importlib
import json
import pkgutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from mlx_speculation.caches import leaves
from mlx_speculation.models import Lane
from support.models import tiny_models

# Root mean square of two-bit values (-1.5, -0.5, 0.5, 1.5), in units of their scale.
_TWO_BITS = 1.1


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of `built`; the module's docstring describes the fields."""

    module: str
    caches: str
    layers: int | None
    window: int | None
    bitwise: bool
    args: dict[str, Any] | None = None
    tiny: str | None = None
    unequal: str | None = None


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """One row of `not_built`."""

    reason: str
    error: str  # a part of the error's text
    args: dict[str, Any] | None = None  # None: the import fails already


def _read() -> dict[str, Any]:
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    return cast(dict[str, Any], json.loads(text))


_TABLE = _read()
COMMON: dict[str, Any] = _TABLE["common"]
BUILT = {name: Architecture(name, **row) for name, row in _TABLE["built"].items()}
NOT_BUILT = {name: NotBuilt(**row) for name, row in _TABLE["not_built"].items()}


# For the quick tests: one architecture for each combination of mlx's layers and kinds
# of caches, and some with attention or mixers of their own.
EACH_KIND = (
    *("llama", "deepseek_v3", "mixtral", "gemma3n", "gpt_oss", "baichuan_m1"),
    *("bailing_hybrid", "qwen3_5", "lfm2", "phi3small", "cohere2", "deepseek_v2"),
    *("deepseek_v32", "deepseek_v41", "ernie4_5_moe", "falcon_h1", "gear", "gemma2"),
    *("gemma3_text", "gpt2", "nemotron_h", "kimi_linear", "llama4", "longcat_flash"),
    *("longcat_flash_ngram", "mamba", "minimax_m3_vl", "nanochat", "phixtral"),
    *("plamo2", "prism_hadamard_qwen35", "recurrent_gemma", "rwkv7", "afm7"),
)

# A shorter list for quick tests: models with attention, windows, experts or states.
FEW = ("deepseek_v2", "falcon_h1", "gemma3n", "gpt_oss", "phi3small", "plamo2", "rwkv7")


def kind_of(model: nn.Module) -> frozenset[str]:
    """Return the kinds of mlx's layers and of caches in a model."""
    kinds = {type(module) for module in model.modules()}
    layers = {kind.__name__ for kind in kinds if kind.__module__.startswith("mlx.")}
    return frozenset(layers | {_kind(cache) for cache in make_prompt_cache(model)})


def architectures() -> tuple[set[str], set[str]]:
    """Return the modules that have a Model, and those that cannot be imported."""
    names, broken = set(), set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            imported = importlib.import_module(f"mlx_lm.models.{module.name}")
        except (Exception, SystemExit):  # one module exits when a package is missing
            broken.add(module.name)
        else:
            if hasattr(imported, "Model") and hasattr(imported, "ModelArgs"):
                names.add(module.name)
    return names, broken


def build(module: str, *, seed: int = 0) -> nn.Module:
    """Build the model of a row with fixed weights; this seeds the global generator."""
    row = BUILT[module]
    if row.tiny is not None:
        return tiny_models.build(row.tiny, seed=seed)
    assert row.args is not None
    return build_from(module, row.args, seed=seed)


def structure(module: str) -> nn.Module:
    """Make the model of a row; its weights are not computed yet."""
    row = BUILT[module]
    if row.tiny is not None:
        return tiny_models.structure(tiny_models.TINY_MODELS[row.tiny])
    assert row.args is not None
    return _made(module, _arguments(module, row.args))


def build_from(module: str, arguments: dict[str, Any], *, seed: int = 0) -> nn.Module:
    args = _arguments(module, arguments)
    mx.random.seed(seed)  # The constructors draw from the global generator.
    model = _made(module, args)
    known = json.dumps([module, args, seed])
    tiny_models.keep_weights(model, known, lambda: _draw(model, module, args))
    return model


def _arguments(module: str, arguments: dict[str, Any]) -> dict[str, Any]:
    args = {"model_type": module, **COMMON, **arguments}
    if "text_config" in arguments:
        args["text_config"] = {**COMMON, **arguments["text_config"]}
    return args


def _made(module: str, args: dict[str, Any]) -> nn.Module:
    imported = importlib.import_module(f"mlx_lm.models.{module}")
    # eval() as in mlx-lm's load: in training mode dbrx sorts its experts differently.
    return cast(nn.Module, imported.Model(imported.ModelArgs.from_dict(args)).eval())


def _draw(model: Any, module: str, args: dict[str, Any]) -> None:
    tiny_models.randomise(model, embedding=tiny_models.embedding_scale(module))
    for _, layer in model.named_modules():
        if {"weight", "scales", "biases"} <= layer.keys():
            _randomise_two_bits(layer)
    # phi3small masks certain ids, so its vocabulary is large enough for them. Its
    # embeddings are also its output layer. Rows of zeros there give all ids beyond the
    # common vocabulary the logit 0, which never wins.
    if args["vocab_size"] > COMMON["vocab_size"]:
        model.model.embed_tokens.weight[COMMON["vocab_size"] :] = 0
    mx.eval(model.parameters())


def _randomise_two_bits(layer: Any) -> None:
    """Give a packed layer random weights of the same scale as other layers."""
    outputs, groups = layer.scales.shape
    inputs = groups * layer.group_size
    scale = mx.full((outputs, groups), 2 / _TWO_BITS / inputs**0.5, dtype=mx.float16)
    bits = mx.random.randint(0, 2**31 - 1, layer.weight.shape)
    layer.weight = bits.astype(mx.uint32)
    layer.scales, layer.biases = scale, -1.5 * scale
    if "signs" in layer:
        layer.signs = mx.where(mx.random.normal((inputs,)) > 0, 1.0, -1.0)


def cache_kinds(model: nn.Module) -> str:
    counts = Counter(_kind(cache) for cache in make_prompt_cache(model))
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def window(model: nn.Module) -> int | None:
    sizes = {
        leaf.max_size
        for _, leaf in leaves(make_prompt_cache(model))
        if isinstance(leaf, RotatingKVCache)
    }
    assert len(sizes) <= 1
    return sizes.pop() if sizes else None


def layers(model: nn.Module) -> int | None:
    parts = getattr(model, "layers", None)
    return None if parts is None else len(parts)


def widths_differ(model: nn.Module, prompt: list[int], rows: list[int]) -> float:
    """Return how far logits of rounds of four tokens differ from those of single steps.

    The prompt is fed first, in one forward. The number of `rows` is a multiple of four.
    """
    wide, narrow = Lane(model), make_prompt_cache(model)
    wide.feed(prompt)
    model(mx.array([prompt]), cache=narrow)
    largest = 0.0
    for start in range(0, len(rows), 4):
        block = rows[start : start + 4]
        with wide.begin() as lane_round:
            together = lane_round.forward(mx.array(block))
            lane_round.commit(4)
        single = [model(mx.array([[token]]), cache=narrow)[0] for token in block]
        apart = mx.concatenate(single)
        difference = mx.where(together == apart, 0, mx.abs(together - apart))
        largest = max(largest, float(difference.max()))
    return largest


def _kind(cache: Any) -> str:
    if type(cache) is not CacheList:
        return type(cache).__name__
    return f"CacheList({', '.join(_kind(member) for member in cache.caches)})"
