"""A grown model is the same function."""

import importlib
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import SpeculativeGenerator, load
from mlx_speculation.demo import demo_models
from mlx_speculation.engine import EagleDraft

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
sys.path.insert(0, SCRIPTS)
growing = importlib.import_module("growing")
sys.path.remove(SCRIPTS)
Growth, grow, parameters_of = growing.Growth, growing.grow, growing.parameters_of
fit_head = growing.fit_head

IDS = mx.array([[(37 * i * i + 11) % 2000 for i in range(24)]])


@pytest.fixture(name="small", scope="module")
def _small() -> Any:
    return load(demo_models()["draft"])[0]


@pytest.mark.parametrize(
    "growth", [Growth(1, 2), Growth(2, 2), Growth(1, 5), Growth(4, 3)]
)
def test_logits_are_the_same(small: Any, growth: Any) -> None:
    larger = grow(small, growth, mx.float32)
    expected, got = small(IDS), larger(IDS)
    assert mx.abs(expected - got).max().item() < 2e-4  # type: ignore[operator]
    assert mx.array_equal(expected.argmax(-1), got.argmax(-1))


def test_decoding_with_a_cache_is_the_same(small: Any) -> None:
    larger = grow(small, Growth(2, 4), mx.float32)
    cache = make_prompt_cache(larger)
    larger(IDS[:, :-1], cache=cache)
    got = larger(IDS[:, -1:], cache=cache)
    assert mx.abs(got[0, -1] - small(IDS)[0, -1]).max().item() < 2e-4  # type: ignore[operator]


def test_it_grows_by_the_square_of_the_width(small: Any) -> None:
    larger = grow(small, Growth(4, 2), mx.bfloat16)
    assert 12 < parameters_of(larger) / parameters_of(small) < 16
    assert larger.layers[0].mlp.up_proj.weight.dtype == mx.bfloat16


def test_a_quantized_model_is_grown_from_its_values() -> None:
    from mlx_lm import load as load_as_stored

    stored: Any = load_as_stored(str(demo_models()["draft"]))[0]
    larger = grow(stored, Growth(2, 2), mx.float32)
    expected = load(demo_models()["draft"])[0](IDS)
    assert mx.abs(larger(IDS) - expected).max().item() < 0.05  # type: ignore[operator]


@pytest.mark.parametrize("growth", [Growth(3, 6), Growth(0, 6), Growth(2, 1)])
def test_other_growths_are_refused(small: Any, growth: Any) -> None:
    with pytest.raises(ValueError, match="power of two"):
        grow(small, growth)


@pytest.mark.slow
def test_a_head_drafts_for_the_grown_model_what_it_drafts_for_the_small_one() -> None:
    folders = demo_models()
    small: Any
    small, tokenizer = load(folders["dense"])
    larger = grow(small, Growth(2, 8), mx.float32)
    heads = {
        EagleDraft.from_folder(folders["eagle"], small): small,
        fit_head(folders["eagle"], small, larger, mx.float32): larger,
    }
    found = []
    for head, model in heads.items():
        generator = SpeculativeGenerator(model, tokenizer, draft=head, draft_length=4)
        result = generator.generate("def add(a, b):", max_tokens=60, stop_tokens=())
        found.append((result.tokens, result.stats.drafted, result.stats.accepted))
    assert found[0] == found[1]
    assert found[0][2] > 20
