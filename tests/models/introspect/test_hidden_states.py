"""Hidden states of real models are right, and collecting them changes no logits.

Quick tests try architectures with unusual features, slow tests try all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models import HiddenStates, find_parts
from support.caches.cache_twins import assert_same, read
from support.covering import covering
from support.models import census
from support.models.tiny_models import TINY_MODELS

QUICK = {
    "cohere2", "deepseek_v3", "deepseek_v41", "falcon_h1", "gemma3n", "gemma4",
    "gpt2", "gpt_neox", "granite", "hunyuan", "iquestloopcoder", "kimi_k3",
    "lille-130m", "llama", "llama4", "longcat_flash_ngram", "mamba", "minicpm",
    "nanbeige", "nanochat", "nemotron_h", "phi3small", "phixtral", "qwen3_5",
    "recurrent_gemma", "rwkv7", "seed_oss", "talkie",
}  # fmt: skip
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in census.BUILT
]
# Parts that cannot be found. Models that are not listed show every part.
MISSING = {
    "deepseek_v41": {"layers", "entry"},
    "gemma3n": {"layers", "entry"},
    "iquestloopcoder": {"layers", "entry"},
    "longcat_flash_ngram": {"embedding"},
    "nanbeige": {"layers"},
}
# Attributes that hold the final norm of a model. Two models have no such norm.
NORMS = {
    "norm", "norm_f", "ln_f", "ln", "final_layernorm", "final_layer_norm",
    "final_norm", "output_norm", "embedding_norm",
}  # fmt: skip
WITHOUT_NORM = {"nanochat": 1e-5, "talkie": 1e-6}

BLOCKS = [
    mx.array([[3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2]]),
    mx.array([[201, 7, 96, 255]]),
    mx.array([[31]]),
]


def fed(model: nn.Module, blocks: list[mx.array] = BLOCKS) -> list[mx.array]:
    caches = make_prompt_cache(model)
    return [model(block, cache=caches) for block in blocks]


@contextmanager
def tapped(model: nn.Module, **options: Any) -> Iterator[HiddenStates]:
    taps = HiddenStates(model, **options)
    yield taps
    taps.remove()


def everything(model: nn.Module) -> dict[str, Any]:
    layers = range(len(find_parts(model).layers))
    return {"layers": layers, "before_norm": True, "after_norm": True}


class Spy:
    """Evaluates and records the inputs and outputs of modules during the forward."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.given: dict[int, list[Any]] = {id(module): [] for module in modules}
        self.returned: dict[int, list[Any]] = {id(module): [] for module in modules}
        for module in modules:
            self._put_on(module, type(module))

    def _put_on(self, module: nn.Module, kind: type[nn.Module]) -> None:
        def call(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            arrays = [value for value in values if isinstance(value, mx.array)]
            self.given[id(this)].append([read(array) for array in arrays[:2]])
            result = kind.__call__(this, *args, **kwargs)
            first = result[0] if isinstance(result, tuple) else result
            self.returned[id(this)].append(read(first))
            return result

        module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def final_norms(model: nn.Module) -> list[nn.Module]:
    layers = [id(part) for layer in model.layers for _, part in layer.named_modules()]
    return [
        module
        for path, module in model.named_modules()
        if path.split(".")[-1] in NORMS and id(module) not in layers
    ]


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_the_forward_and_no_bit_of_it_changes(name: str) -> None:
    model = census.build(name)
    plain = [read(logits) for logits in fed(model)]
    classes = {path: type(module) for path, module in model.named_modules()}
    flat: Any = tree_flatten(model.parameters())
    parameters = [path for path, _ in flat]
    with tapped(model, **everything(model)) as taps:
        with taps.collect() as states:
            logits = fed(model)
        for index, (tapped_states, expected) in enumerate(
            zip(logits, plain, strict=True)
        ):
            assert_same(read(tapped_states), expected, f"logits of block {index}")
        again: Any = tree_flatten(model.parameters())
        assert [path for path, _ in again] == parameters
        for path, module in model.named_modules():
            assert isinstance(module, classes[path])
        parts = taps.parts
        tops = [read(taps.head(hidden)) for hidden in split(states.after_norm)]
        for index, (tapped_states, expected) in enumerate(
            zip(tops, plain, strict=True)
        ):
            assert_same(tapped_states, expected, f"head of block {index}")
        before, after = read(states.before_norm), read(states.after_norm)
        layers = [read(states.layer(index)) for index in range(len(parts.layers))]
    assert set(parts.missing) == MISSING.get(name, set())
    assert {path: type(m) for path, m in model.named_modules()} == classes

    norms = final_norms(model)
    spy = Spy([*model.layers, *norms])
    fed(model)
    if name in WITHOUT_NORM:
        assert not norms
        normed = mx.fast.rms_norm(mx.array(before), None, WITHOUT_NORM[name])
        assert_same(after, read(normed), "after a norm without weights")
        assert_same(before, layers[-1], "before a norm without weights")
    else:
        (norm,) = norms
        seen = joined(spy, norm, calls=parts.norm_calls)
        assert_same(before, seen[0], "what the final norm is given")
        assert_same(after, seen[1], "what the final norm returns")
    if "layers" in parts.missing:
        return
    assert len(layers) == len(model.layers)
    for index, layer in enumerate(model.layers):
        given, returned = joined(spy, layer, which=int(name == "talkie"))
        assert_same(layers[index], returned, f"what layer {index} returns")
        if index:
            assert_same(layers[index - 1], given, f"what layer {index} is given")
    assert_same(layers[-1], before, "the last layer and the final norm")


def split(rows: mx.array) -> list[mx.array]:
    ends = np.cumsum([0, *(block.shape[1] for block in BLOCKS)]).tolist()
    return [rows[:, start:stop] for start, stop in pairwise(ends)]


def joined(spy: Spy, module: nn.Module, which: int = 0, calls: int = 1) -> list[Any]:
    """Return the inputs and the outputs of a module, joined over all blocks."""
    given = [arrays[which] for arrays in spy.given[id(module)][calls - 1 :: calls]]
    returned = spy.returned[id(module)][calls - 1 :: calls]
    return [np.concatenate(given, axis=1), np.concatenate(returned, axis=1)]


# Settings of real checkpoints, unlike those of the census.
SCALED: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.0625},
    "falcon_h1": {
        "tie_word_embeddings": True,
        "lm_head_multiplier": 0.04,
        "embedding_multiplier": 5.5,
    },
    "gemma3_text": {"tie_word_embeddings": True},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "granitemoehybrid": {"logits_scaling": 6.0, "tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": True},
    "minicpm": {"dim_model_base": 16, "scale_emb": 12.0},
    "muse_glimmer": {"output_multiplier": 0.3},
    "nemotron_h": {"tie_word_embeddings": True},
    "qwen3_next": {"tie_word_embeddings": True},
}


def scaled(name: str) -> nn.Module:
    row = census.BUILT[name]
    arguments = TINY_MODELS[row.tiny].args if row.tiny is not None else row.args
    assert arguments is not None
    return census.build_from(name, arguments | SCALED[name])


@pytest.mark.parametrize("name", SCALED)
def test_the_head_scales_and_caps_as_the_model_does(name: str) -> None:
    model = scaled(name)
    plain = [read(logits) for logits in fed(model)]
    with tapped(model, after_norm=True) as taps:
        with taps.collect() as states:
            fed(model)
        for rows, logits in zip(split(states.after_norm), plain, strict=True):
            assert_same(read(taps.head(rows)), logits, name)


def test_the_head_takes_any_rows_and_leaves_them_as_they_are() -> None:
    """gemma3n and phi3small write into arrays that they are given."""
    for name in ("llama", "gemma3n", "phi3small", "gpt_neox"):
        model = census.build(name)
        with tapped(model) as taps:
            rows = mx.random.normal((2, 5, taps.parts.dim), key=mx.random.key(0))
            values = read(rows)
            first = read(taps.head(rows))
            assert_same(read(rows), values, name)
            assert_same(read(taps.head(rows)), first, name)
            assert first.shape[:2] == (2, 5)


EMBEDDINGS = {
    "gemma2": lambda rows, model: rows * 64**0.5,
    "gemma3n": None,
    "gpt2": lambda rows, model: rows + model.model.wpe(mx.arange(rows.shape[1])),
    "granite": lambda rows, model: rows * 12,
    "llama": lambda rows, model: rows,
    "minicpm": lambda rows, model: rows * 12,
    "nanochat": lambda rows, model: mx.fast.rms_norm(rows, None, 1e-5),
    "qwen3_5": lambda rows, model: rows,
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_are_rows_of_the_table_or_what_the_first_layer_is_given(
    name: str,
) -> None:
    model = scaled(name) if name in ("granite", "minicpm") else census.build(name)
    (table,) = (
        module
        for path, module in model.named_modules()
        if path.split(".")[-1] in {"embed_tokens", "wte"}
    )
    tokens = mx.array([[5, 200, 17], [0, 255, 5]])
    enter = EMBEDDINGS[name]
    with tapped(model) as taps:
        rows = table.weight[tokens]
        assert_same(read(taps.embed(tokens)), read(rows), name)
        if enter is None:
            with pytest.raises(UnsupportedModelError, match="one hidden state per pos"):
                taps.embed(tokens, scaled=True)
            return
        given = taps.embed(tokens, scaled=True)
        assert_same(read(given), read(enter(rows, model)), f"{name} scaled")


@pytest.mark.parametrize("name", ["llama", "dots1", "mamba", "gpt2", "pixtral"])
def test_a_model_without_the_later_layers_ends_in_the_state_of_the_last_one(
    name: str,
) -> None:
    """Norm and head turn a layer's state into the logits of a model that ends there."""
    model = census.build(name)
    (norm,) = final_norms(model)
    layers = list(model.layers)
    with tapped(model, layers=range(len(layers))) as taps:
        with taps.collect() as states:
            fed(model, BLOCKS[:1])
        expected = [
            read(taps.head(norm(states.layer(index)))) for index in range(len(layers))
        ]
    for count in range(1, len(layers) + 1):
        model.layers[:] = layers[:count]
        (shorter,) = fed(model, BLOCKS[:1])
        assert_same(read(shorter), expected[count - 1], f"{count} layers")


@pytest.mark.parametrize(
    ("name", "form"),
    covering(("llama", "qwen3_5", "gemma2"), ("bfloat16", "4 bit", "4 bit bfloat16")),
)
def test_other_types_and_quantized_weights_change_nothing(name: str, form: str) -> None:
    model = census.build(name)
    if "bfloat16" in form:
        model.set_dtype(mx.bfloat16)
    if "4 bit" in form:
        nn.quantize(model, group_size=32, bits=4, class_predicate=_fits)
    plain = [read(logits) for logits in fed(model)]
    with tapped(model, **everything(model)) as taps:
        assert not taps.parts.missing
        with taps.collect() as states:
            logits = fed(model)
        for tapped_states, expected in zip(logits, plain, strict=True):
            assert_same(read(tapped_states), expected, "logits")
        for rows, expected in zip(split(states.after_norm), plain, strict=True):
            assert_same(read(taps.head(rows)), expected, "head")
        assert states.before_norm.dtype == states.layer(0).dtype
        embedding: Any = taps.parts.embedding
        tokens = mx.array([[1, 2]])
        assert_same(read(taps.embed(tokens)), read(embedding(tokens)), "embeddings")


def _fits(path: str, module: nn.Module) -> bool:
    weight: Any = getattr(module, "weight", None)
    return hasattr(module, "to_quantized") and weight.shape[-1] % 32 == 0
