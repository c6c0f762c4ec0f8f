"""A grown hybrid model is the same function, and its MTP head drafts the same.

Faults that were made by hand, and found here:
    rows for q, k and v are tiled as one; kernels of the convolution are divided
    heads are repeated in place of tiled; a norm within a head is divided
    the final norm is not divided; a further layer adds something
    the head's projection reads embeddings and states by turns; its final norm is not
    divided; its norm of the state keeps its epsilon; the head is not quantized
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlx_speculation import SpeculativeGenerator, load
from mlx_speculation.demo import demo_models
from mlx_speculation.engine import MtpDraft
from mlx_speculation.models import MtpConvention
from support.models.tiny_models import build

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
sys.path.insert(0, SCRIPTS)
growing = importlib.import_module("growing")
hybrid = importlib.import_module("growing_hybrid")
sys.path.remove(SCRIPTS)
Growth = growing.Growth

FOLDER = demo_models()["hybrid"]
IDS = mx.array([[(37 * i * i + 11) % 2000 for i in range(20)]])
WIDTH, LAYERS = 2, 8


@pytest.fixture(name="grown", scope="module")
def _grown() -> Any:
    """The demo target, what it was grown to, and both heads."""
    small: Any
    small, tokenizer = load(FOLDER)
    larger = hybrid.grow_hybrid(small, Growth(WIDTH, LAYERS), mx.float32)
    own = MtpDraft.from_folder(FOLDER, small)
    head = hybrid.fit_mtp_head(FOLDER, small, larger, mx.float32)
    return SimpleNamespace(
        small=small, larger=larger, own=own, head=head, tokenizer=tokenizer
    )


def distance(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max().item())  # type: ignore[arg-type]


def test_logits_are_the_same(grown: Any) -> None:
    expected, got = grown.small(IDS), grown.larger(IDS)
    assert distance(expected, got) < 2e-4
    assert mx.array_equal(expected.argmax(-1), got.argmax(-1))


def test_decoding_with_a_cache_is_the_same(grown: Any) -> None:
    cache = make_prompt_cache(grown.larger)
    assert [isinstance(c, ArraysCache) for c in cache] == [True, True, False] * 2 + [
        True,
        True,
    ]
    grown.larger(IDS[:, :-2], cache=cache)
    for last in (IDS[:, -2:-1], IDS[:, -1:]):
        got = grown.larger(last, cache=cache)
    assert distance(got[0, -1], grown.small(IDS)[0, -1]) < 2e-4


def test_further_layers_add_exactly_nothing(grown: Any) -> None:
    deeper = hybrid.grow_hybrid(grown.small, Growth(1, 10), mx.float32)
    assert mx.array_equal(deeper(IDS), grown.small(IDS))


@pytest.mark.slow
def test_a_grown_head_drafts_what_the_small_one_drafts(grown: Any) -> None:
    found = []
    for model, head in ((grown.small, grown.own), (grown.larger, grown.head)):
        generator = SpeculativeGenerator(
            model, grown.tokenizer, draft=head, draft_length=4
        )
        result = generator.generate("def add(a, b):", max_tokens=40, stop_tokens=())
        found.append((result.tokens, result.stats.drafted, result.stats.accepted))
    assert found[0] == found[1]
    assert found[0][2] > 15


def test_a_grown_head_is_the_same_whatever_the_epsilon_of_its_norms(
    grown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input is divided by the width, which an epsilon of 1e-6 does not show."""
    for model in (grown.small, grown.larger):
        monkeypatch.setattr(model.language_model.args, "rms_norm_eps", 0.5)
    convention = MtpConvention(norms=grown.own.mtp.head.convention.norms)
    own = MtpDraft.from_folder(FOLDER, grown.small, convention=convention)
    monkeypatch.setattr(hybrid, "load_mtp_head", lambda *_: own.own_weights)
    head = hybrid.fit_mtp_head(FOLDER, grown.small, grown.larger, mx.float32)
    hidden = mx.random.normal((1, 5, 512), key=mx.random.key(3))
    wide = mx.tile(hidden, [1, 1, WIDTH]) / WIDTH  # as the divided norm gives it
    expected = own.mtp.rows(hidden, IDS[:, :5], own.mtp.head.new_caches()[0])
    got = head.mtp.rows(wide, IDS[:, :5], head.mtp.head.new_caches()[0])
    assert distance(got.logits, expected.logits) < 2e-4
    recycled = mx.tile(expected.recycled, [1, 1, WIDTH]) / WIDTH
    assert distance(got.recycled, recycled) < 2e-4


def test_most_parameters_are_where_they_were(grown: Any) -> None:
    few, many = hybrid.shares_of(grown.small), hybrid.shares_of(grown.larger)
    kinds = {"embed_tokens", "linear_attn", "self_attn", "mlp"}
    assert few.keys() == many.keys() == kinds
    assert 0.95 < sum(many.values()) <= 1.001
    assert many["linear_attn"] > many["self_attn"] > many["embed_tokens"]
    ratio = growing.parameters_of(grown.larger) / growing.parameters_of(grown.small)
    assert 4.5 < ratio < WIDTH**2 * LAYERS / 6


def test_four_bits_are_those_of_the_grown_weights(grown: Any) -> None:
    packed = hybrid.grow_hybrid(grown.small, Growth(WIDTH, 7), bits=4)
    layers = packed.layers
    assert all("scales" in layer.mlp.up_proj for layer in layers)
    assert "scales" in packed.model.embed_tokens
    assert layers[0].input_layernorm.weight.dtype == mx.bfloat16
    assert layers[0].linear_attn.A_log.dtype == mx.float32
    head = hybrid.fit_mtp_head(FOLDER, grown.small, packed, bits=4)
    assert "scales" in head.own_weights.layers[0].proj
    dense = growing.dense_parameters(layers[1].mlp)["up_proj.weight"]
    exact = grown.larger.layers[1].mlp.up_proj.weight
    assert distance(dense, exact) < 0.1 * distance(exact, mx.zeros(1))


@pytest.mark.parametrize("growth", [Growth(3, 6), Growth(2, 5)])
def test_other_growths_are_refused(grown: Any, growth: Any) -> None:
    with pytest.raises(ValueError, match="power of two"):
        hybrid.grow_hybrid(grown.small, growth)


def test_an_output_layer_of_its_own_is_refused() -> None:
    model: Any = build("qwen3_5")
    model.language_model.args.tie_word_embeddings = False
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        hybrid.grow_hybrid(model, Growth(2, 8))


def test_a_quantized_model_is_grown_from_its_values(grown: Any) -> None:
    from mlx_lm import load as load_as_stored

    stored: Any = load_as_stored(str(FOLDER))[0]
    assert "scales" in stored.layers[0].linear_attn.in_proj_qkv
    found, expected = map(growing.dense_parameters, (stored, grown.small))
    assert found.keys() == expected.keys()
    assert max(distance(found[name], expected[name]) for name in found) < 0.02
