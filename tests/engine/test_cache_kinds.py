"""Caches of the rarer kinds hold what plain decoding leaves in them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    QuantizedKVCache,
    make_prompt_cache,
)

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.caches import position
from support.caches.cache_twins import assert_same, detached, read
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import GREEDY, prompt_of
from support.models import tiny_models
from support.models.tiny_models import TINY_MODELS, build_tiny, read_table
from support.models.tiny_tokenizer import byte_tokenizer

RARER = read_table(Path(tiny_models.__file__).with_name("cache_kind_models.json"))
TOKENS = 20
KINDS: dict[str, Callable[[], Any]] = {
    "8 bits": lambda: QuantizedKVCache(group_size=32, bits=8),
    "4 bits": lambda: QuantizedKVCache(group_size=32, bits=4),
    "concatenated": ConcatenateKVCache,
}


def rows(caches: list[Any]) -> Any:
    """Return the rows of each cache; a quantized one has three arrays for keys."""
    return read([[c.offset, detached(c.keys_and_values())] for c in caches])


def test_a_drafts_own_chunks_hold_what_was_kept_of_several_forwards() -> None:
    """Each drafted token takes a forward, and a forward drops a row of a full chunk."""
    target, draft = (build_tiny(RARER["llama4"], seed=seed) for seed in (0, 1))
    generator = SpeculativeGenerator(target, byte_tokenizer(), draft=draft)
    caches, prompt = make_prompt_cache(draft), prompt_of(40)
    result = generator.generate(
        prompt, max_tokens=TOKENS, sampling=GREEDY, draft_cache=caches
    )
    assert result.stats.accepted < result.stats.drafted
    known, native = prompt + result.tokens, make_prompt_cache(draft)
    cached = position(caches)
    for token in known[:cached]:
        draft(mx.array([[token]]), cache=native)
    for cache in (*caches, *native):
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
    assert_same(rows(caches), rows(native), "the draft's caches")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("right", [0.0, 0.7])
def test_a_callers_caches_hold_what_plain_decoding_leaves_in_them(
    kind: str, right: float
) -> None:
    """A head_dim of 32 is the smallest that can be quantized."""
    tiny = TINY_MODELS["llama"]
    model = build_tiny(replace(tiny, args={**tiny.args, "head_dim": 32}))
    prompt, native = prompt_of(13), [KINDS[kind]() for _ in model.layers]
    steps = generate_step(
        mx.array(prompt), model, max_tokens=TOKENS, prompt_cache=native
    )
    expected = [int(token) for token, _ in steps]
    drafter = ScriptedDrafter(prompt + expected, right, seed=3, ragged=True)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=drafter)
    caches = [KINDS[kind]() for _ in model.layers]
    result = generator.generate(
        prompt, max_tokens=TOKENS, sampling=GREEDY, prompt_cache=caches
    )
    assert result.tokens == expected
    assert position(caches) == len(prompt) + TOKENS
    assert_same(rows(caches), rows(native), "the caller's caches")
