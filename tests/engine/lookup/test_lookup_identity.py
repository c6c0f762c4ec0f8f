"""Text with lookups and cascades equals plain decoding's."""

import random
from functools import cache, partial

import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    CascadeDraft,
    LookupDraft,
    PrefixCache,
    Sampling,
    SpeculativeGenerator,
)
from mlx_speculation.engine import Result
from mlx_speculation.engine.equivalence.texts import Parting
from mlx_speculation.samplers import Chooser
from mlx_speculation.samplers.verifier import Acceptance
from support.covering import covering
from support.identity import GREEDY, SAMPLED, assert_same_text
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

# Dense, sliding (the texts exceed the window of 16), and two hybrids. Tests of other
# models are marked slow.
MODELS = ("llama", "gemma3_text", "qwen3_5", "recurrent_gemma")
OTHERS = sorted(set(TINY_MODELS) - set(MODELS))
PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
TOKENS = 40
KINDS = ("text", "corpus", "cascade")


@cache
def known(name: str, sampled: bool) -> tuple[nn.Module, list[int]]:
    model = build(name)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    sampling = SAMPLED if sampled else GREEDY
    return model, plain.generate(PROMPT, max_tokens=TOKENS, sampling=sampling).tokens


def nearly(text: list[int], seed: int, wrong: float = 0.1) -> list[int]:
    """Return a text with some tokens changed, so that lookups are sometimes wrong."""
    draw = random.Random(seed)
    return [draw.randrange(256) if draw.random() < wrong else t for t in text]


def drafts_of(kind: str, text: list[int]) -> LookupDraft | CascadeDraft:
    """Return a draft that finds parts of the text; its corpus lacks the prompt."""
    corpus = [nearly(text, seed) for seed in range(2)]
    if kind == "text":
        return LookupDraft()
    if kind == "corpus":
        return LookupDraft(corpus=corpus)
    lookup = LookupDraft(corpus=corpus)
    return CascadeDraft(lookup, build("llama", seed=0))


def check(
    name: str,
    sampled: bool,
    draft: LookupDraft | CascadeDraft,
    length: int,
) -> tuple[Result, Parting | None]:
    model, text = known(name, sampled)
    sampling = SAMPLED if sampled else GREEDY
    generator = SpeculativeGenerator(
        model,
        byte_tokenizer(),
        draft=draft,
        draft_length=length,
    )
    result = generator.generate(PROMPT, max_tokens=TOKENS, sampling=sampling)
    parting = assert_same_text(
        model,
        Chooser(sampling, 256),
        PROMPT,
        text,
        result.tokens,
        width=length + 1,
        bitwise=TINY_MODELS[name].bitwise,
    )
    return result, parting


WAYS = [
    *covering(MODELS, KINDS, ("greedy", "sampled")),
    *(
        pytest.param(name, kind, chosen, marks=pytest.mark.slow)
        for name in OTHERS
        for kind in KINDS
        for chosen in ("greedy", "sampled")
    ),
]


@pytest.mark.parametrize(("name", "kind", "chosen"), WAYS)
def test_lookups_and_cascades_leave_the_text_as_it_is(
    name: str, kind: str, chosen: str
) -> None:
    sampled = chosen == "sampled"
    text = known(name, sampled)[1]
    result, _ = check(name, sampled, drafts_of(kind, text), 5)
    stats = result.stats
    assert stats.emitted == TOKENS
    assert stats.drafted == sum(counts.drafted for counts in stats.sources.values())
    assert stats.accepted == sum(counts.accepted for counts in stats.sources.values())
    if kind == "text":
        return
    counts = stats.sources["lookup"]
    assert 0 < counts.accepted < counts.drafted
    if kind == "corpus":
        assert set(stats.sources) == {"lookup"}
    else:
        assert set(stats.sources) <= {"lookup", "model"}


@given(
    name=st.sampled_from(MODELS),
    sampled=st.booleans(),
    length=st.integers(1, 9),
    wrong=st.sampled_from([0.02, 0.2, 0.5]),
    seed=st.integers(0, 9),
)
@settings(max_examples=max(8, settings().max_examples // 8))
def test_any_lookup_leaves_the_text_as_it_is(
    name: str,
    sampled: bool,
    length: int,
    wrong: float,
    seed: int,
) -> None:
    text = known(name, sampled)[1]
    drafter = LookupDraft(corpus=[nearly(PROMPT + text, seed, wrong)])
    check(name, sampled, drafter, length)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_was_passed_over_is_as_good_as_ever(name: str) -> None:
    """While lookups draft, the model reads nothing; then it reads the missed tokens."""
    text = known(name, True)[1]
    # The lookup is always right, but finds only the first 25 tokens of 40.
    lookup = LookupDraft(corpus=[text[:25]])
    result, parting = check(name, True, CascadeDraft(lookup, build(name)), 6)
    sources = result.stats.sources
    assert sources["lookup"].accepted > 15
    assert sources["model"].drafted > 5
    if parting is None:
        assert sources["model"].accepted > 0.9 * sources["model"].drafted
        if TINY_MODELS[name].bitwise:
            assert sources["model"].accepted == sources["model"].drafted


def test_a_cascade_works_with_prompt_and_prefix_caches() -> None:
    model, text = known("qwen3_5", True)
    small = build("llama")
    draft = CascadeDraft(LookupDraft(corpus=[nearly(text, 1)]), small)
    generator = SpeculativeGenerator(
        model, byte_tokenizer(), draft=draft, prefix_cache=PrefixCache(1 << 24)
    )
    generate = partial(generator.generate, sampling=SAMPLED)
    assert generate(PROMPT, max_tokens=40).tokens == text[:40]
    again = generate(PROMPT, max_tokens=40)
    assert again.tokens == text[:40]
    assert again.stats.reused > 0
    caches, small_caches = make_prompt_cache(model), make_prompt_cache(small)
    first = generate(
        PROMPT, max_tokens=10, prompt_cache=caches, draft_cache=small_caches
    )
    assert first.tokens == text[:10]
    assert first.cached_tokens == PROMPT + text[:10]
    assert first.next_token == text[10]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_seed_repeats_its_text_whatever_came_before(acceptance: Acceptance) -> None:
    """Noise depends on where rounds start. Earlier answers must not move the starts."""
    generator = SpeculativeGenerator(
        build("llama"),
        byte_tokenizer(),
        draft="lookup",
        draft_length=4,
        acceptance=acceptance,
    )
    sampling = Sampling(temperature=0.2, seed=5)

    def text(start: int) -> list[int]:
        prompt = [start, *PROMPT]
        return generator.generate(prompt, max_tokens=60, sampling=sampling).tokens

    first = text(1)
    for other in range(2, 6):
        text(other)
    assert text(1) == first
