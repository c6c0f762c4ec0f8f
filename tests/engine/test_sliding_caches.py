"""Sliding-window caches that a caller passes stay native."""

from typing import Any

import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.caches import (
    KVQuantization,
    SlidingKVCache,
    as_native,
    check_supported,
    with_slack,
)
from mlx_speculation.engine import config
from mlx_speculation.engine.drafters import draft_model
from mlx_speculation.engine.stream_factory import requests
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane
from support.drafters.scripted_drafter import ScriptedDrafter
from support.drop_in import both
from support.identity import plain_text
from support.models import census
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

WINDOWED = [name for name, tiny in TINY_MODELS.items() if tiny.window]
PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(20)]


def kinds(caches: list[Any]) -> set[type]:
    return {type(leaf) for leaf in check_supported(caches)}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_lane_replaces_the_rings_that_it_makes(name: str) -> None:
    model = build(name)
    native, slack = Lane(model).caches, Lane(model, sliding="slack").caches
    assert RotatingKVCache in kinds(native)
    assert SlidingKVCache in kinds(slack)
    assert RotatingKVCache not in kinds(slack)
    passed = make_prompt_cache(model)
    assert Lane(model, passed, sliding="slack").caches is passed
    assert SlidingKVCache not in kinds(passed)


@pytest.fixture(name="made")
def _made(monkeypatch: pytest.MonkeyPatch) -> list[Lane]:
    lanes: list[Lane] = []

    class NotedLane(Lane):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            lanes.append(self)

    for module in (config, draft_model, requests):
        monkeypatch.setattr(module, "Lane", NotedLane)
    return lanes


@pytest.mark.parametrize("sliding", ["slack", "native", None])
def test_target_and_draft_get_the_kind_that_was_asked_for(
    sliding: Any, made: list[Lane]
) -> None:
    model, tokenizer = build("gemma3_text"), byte_tokenizer()
    options = {} if sliding is None else {"sliding": sliding}
    generator = SpeculativeGenerator(model, tokenizer, draft=model, **options)
    made.clear()
    result = generator.generate(PROMPT, max_tokens=40)
    assert result.tokens == plain_text(model, PROMPT, 40)
    assert result.stats.accepted > 0
    expected = RotatingKVCache if sliding == "native" else SlidingKVCache
    assert len(made) >= 2
    for lane in made:
        assert expected in kinds(lane.caches)
        assert len(kinds(lane.caches) & {RotatingKVCache, SlidingKVCache}) == 1
    assert sum(lane.seen > 50 for lane in made) == 2  # both were written to


@pytest.mark.parametrize("name", WINDOWED)
def test_converted_caches_can_be_passed_and_turned_back(name: str) -> None:
    model, tokenizer = build(name), byte_tokenizer()
    expected = plain_text(model, PROMPT, 63)
    text = PROMPT + expected
    drafter = ScriptedDrafter(text, 0.7, seed=3, ragged=True)
    generator = SpeculativeGenerator(model, tokenizer, draft=drafter)
    caches = make_prompt_cache(model)
    written: list[int] = []
    kept: list[int] = []
    for convert in (list, with_slack, as_native):
        caches = convert(caches)
        result = generator.generate(
            [text[len(kept)]] if kept else PROMPT,
            max_tokens=21 if not kept else 20,
            prompt_cache=caches,
            cached_tokens=kept,
        )
        written += result.tokens if not kept else [text[len(kept)], *result.tokens]
        kept = result.cached_tokens
    assert kinds(caches) == kinds(make_prompt_cache(model))
    assert written == expected[: len(written)]
    assert len(written) == 63


@pytest.mark.parametrize("sliding", ["slack", "native"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_windows_are_not_quantized_by_any_door(sliding: Any, family: str) -> None:
    """Streams, batches and requests with passed caches refuse quantized windows."""
    made = SpeculativeGenerator(build(family), byte_tokenizer(), sliding=sliding)
    quantization = KVQuantization(bits=8, group_size=32, start=6)
    refused = r"kv_bits is 8, and mlx-lm cannot quantize a \w+KVCache"
    with pytest.raises(InvalidRequestError, match=refused):
        made.stream([1, 2, 3], max_tokens=20, kv_quantization=quantization)
    with pytest.raises(InvalidRequestError, match=refused):
        made.generate_batch([[1, 2], [3]], max_tokens=20, kv_quantization=quantization)
    caches = make_prompt_cache(made.model)
    with pytest.raises(InvalidRequestError, match=refused):
        made.generate(
            [1], max_tokens=20, kv_quantization=quantization, prompt_cache=caches
        )
    assert caches[0].offset == 0
    # A text that ends before quantization would start is not affected.
    result = made.generate([1, 2], max_tokens=3, kv_quantization=quantization)
    assert result.tokens == made.generate([1, 2], max_tokens=3).tokens


def test_windows_that_mlx_lm_leaves_alone_are_not_refused() -> None:
    """mlx-lm does not quantize caches inside a `CacheList`."""
    model = census.build("baichuan_m1")
    options: dict[str, Any] = {
        "kv_bits": 8,
        "kv_group_size": 32,
        "quantized_kv_start": 0,
    }
    expected, got = both(
        model, byte_tokenizer(), [1, 2, 3], ours={}, max_tokens=9, **options
    )
    assert got.tokens == expected.tokens
