"""Speculative text equals plain text for models with caches of the rarer kinds.

llama4 drops old rows in the middle of a round; deepseek_v41 closes groups of rows;
some models have fewer or more caches than layers, and some have lists of caches. A
model that drafts for itself makes several forwards in one round.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    QuantizedKVCache,
    make_prompt_cache,
)

from mlx_speculation import Sampling, SpeculativeGenerator
from mlx_speculation.caches import check_supported, position
from support.caches.cache_twins import assert_same, detached, read
from support.drafters.scripted_drafter import ScriptedDrafter
from support.models import tiny_models
from support.models.tiny_models import TINY_MODELS, build_tiny, read_table
from support.models.tiny_tokenizer import byte_tokenizer

RARER = read_table(Path(tiny_models.__file__).with_name("cache_kind_models.json"))
MODELS = {
    **RARER,
    **{name: TINY_MODELS[name] for name in ("gemma4_text", "nemotron_h")},
}
TOKENS = 20
GREEDY = Sampling(seed=0)
# Layers and caches, and leaves among these.
COUNTS = {
    "llama4": (4, 4, 4),
    "longcat_flash": (2, 2, 4),
    "longcat_flash_ngram": (2, 3, 5),
    "gemma3n": (6, 4, 4),
    "minimax_m3_vl": (3, 3, 5),
    "deepseek_v32": (3, 3, 6),
    "deepseek_v41": (5, 5, 5),
    "gemma4_text": (4, 2, 2),
    "nemotron_h": (4, 3, 3),
}


def prompt_of(length: int) -> list[int]:
    """Return a prompt that does not repeat itself."""
    return [(37 * i * i + 11 * i + length) % 256 for i in range(length)]


@pytest.mark.parametrize("name", MODELS)
def test_each_cache_of_the_model_is_known(name: str) -> None:
    model = build_tiny(MODELS[name])
    caches = make_prompt_cache(model)
    counts = (len(model.layers), len(caches), len(check_supported(caches)))
    assert counts == COUNTS[name]


def test_a_drafts_own_chunks_hold_what_was_kept_of_several_forwards() -> None:
    """The draft runs a forward for each token, and each drops a row of a full chunk.

    A fault would not change the text, since the target chooses the emitted tokens.
    """
    target, draft = (build_tiny(MODELS["llama4"], seed=seed) for seed in (0, 1))
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


def wide_llama() -> nn.Module:
    """Return a llama with heads of 32, which is the least that can be quantized."""
    tiny = TINY_MODELS["llama"]
    return build_tiny(replace(tiny, args={**tiny.args, "head_dim": 32}))


KINDS: dict[str, Callable[[], Any]] = {
    "8 bits": lambda: QuantizedKVCache(group_size=32, bits=8),
    "4 bits": lambda: QuantizedKVCache(group_size=32, bits=4),
    "concatenated": ConcatenateKVCache,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("right", [0.0, 0.7])
def test_a_callers_caches_hold_what_plain_decoding_leaves_in_them(
    kind: str, right: float
) -> None:
    model, prompt = wide_llama(), prompt_of(13)
    native = [KINDS[kind]() for _ in model.layers]
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


def rows(caches: list[Any]) -> Any:
    """Return the rows of each cache; a quantized one has three arrays for keys."""
    return read([[c.offset, detached(c.keys_and_values())] for c in caches])


def test_a_cache_that_was_quantized_later_goes_on_as_in_plain_decoding() -> None:
    model, prompt = wide_llama(), prompt_of(40)

    def prefilled() -> list[Any]:
        caches = make_prompt_cache(model)
        model(mx.array([prompt[:-1]]), cache=caches)
        return [cache.to_quantized(group_size=32, bits=8) for cache in caches]

    steps = generate_step(
        mx.array(prompt[-1:]), model, max_tokens=TOKENS, prompt_cache=prefilled()
    )
    expected = [int(token) for token, _ in steps]
    drafter = ScriptedDrafter(prompt + expected, 0.7, seed=3, ragged=True)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=drafter)
    result = generator.generate(
        prompt[-1:],
        max_tokens=TOKENS,
        sampling=GREEDY,
        prompt_cache=prefilled(),
        cached_tokens=prompt[:-1],
    )
    assert result.tokens == expected
    assert result.stats.accepted > 0
