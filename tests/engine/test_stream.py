"""Streams: stop tokens, budgets, characters, closing, and the caches afterwards."""

import gc
from functools import cache
from itertools import combinations
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    Sampling,
    Speculation,
    SpeculationError,
    SpeculativeGenerator,
)
from mlx_speculation.caches import RecordingArraysCache
from mlx_speculation.caches.journals.rotating_kv import PresentedRing
from mlx_speculation.engine import Stream
from mlx_speculation.engine.round import outcome
from mlx_speculation.models import (
    PREFILL_STEP,
    Lane,
    LaneRound,
    usual_prefill_step,
)
from support.covering import covering
from support.drafters.scripted_drafter import ScriptedDrafter
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

# A model for each kind of cache and mixture of kinds. Logits of all but gemma3_text and
# recurrent_gemma have the same bits however many tokens a forward reads.
MODELS = ("llama", "gemma3_text", "qwen3_5", "mamba", "recurrent_gemma", "lfm2")
PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
PROBE = mx.array([[1, 2, 3]])
SAMPLED = Sampling(temperature=0.8, seed=4)


@cache
def known(name: str) -> tuple[nn.Module, Any, list[int]]:
    model = build(name)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    text = plain.generate(PROMPT, max_tokens=60, sampling=SAMPLED).tokens
    return model, plain, text


def pair(name: str, right: float = 0.6) -> tuple[nn.Module, Any, Any, list[int]]:
    """Return a model, its plain and its speculative generator, and the text."""
    model, plain, text = known(name)
    drafter = ScriptedDrafter(PROMPT + text, right=right, seed=1)
    drafted = SpeculativeGenerator(
        model, byte_tokenizer(), draft=drafter, draft_length=4
    )
    return model, plain, drafted, text


@pytest.mark.parametrize(("name", "drafted"), covering(MODELS, (False, True)))
def test_a_finished_generation_leaves_prompt_and_tokens_in_the_cache(
    name: str, drafted: bool
) -> None:
    model, plain, speculative, text = pair(name)
    generator = speculative if drafted else plain
    for count in (0, 1, 8, 9):
        caches = make_prompt_cache(model)
        result = generator.generate(
            PROMPT, max_tokens=count, sampling=SAMPLED, prompt_cache=caches
        )
        assert result.tokens == text[:count]
        assert result.cached_tokens == PROMPT + result.tokens
        assert result.finish_reason == "length"
        assert result.next_token == text[count]
        _assert_holds(name, caches, result.cached_tokens)


@pytest.mark.parametrize(("name", "drafted"), covering(MODELS, (False, True)))
def test_a_stream_closed_early_holds_the_tokens_it_names(
    name: str, drafted: bool
) -> None:
    model, plain, speculative, text = pair(name)
    generator = speculative if drafted else plain
    for count in range(6):
        caches = make_prompt_cache(model)
        stream = generator.stream(
            PROMPT, max_tokens=50, sampling=SAMPLED, prompt_cache=caches
        )
        yielded = [next(stream).token for _ in range(count)]
        with pytest.raises(SpeculationError, match="still running"):
            _ = stream.result
        stream.close()
        stream.close()
        assert next(stream, None) is None
        assert yielded == text[:count]
        kept = stream.cached_tokens
        if count:
            assert kept[: len(PROMPT) + count] == PROMPT + yielded
            assert len(kept) < len(PROMPT) + count + 5
            _assert_holds(name, caches, kept)
        else:
            assert kept == []
            assert all(cache.empty() for cache in caches)
        assert stream.result.finish_reason == "closed"
        assert stream.result.tokens == yielded


@pytest.mark.parametrize(
    ("name", "drafted", "named", "close"),
    covering(MODELS, *[(False, True)] * 3, pairs=[(0, 1), (0, 3), (1, 2), (1, 3)]),
)
def test_going_on_gives_the_uninterrupted_text(
    name: str, drafted: bool, named: bool, close: bool
) -> None:
    model, plain, speculative, text = pair(name)
    if not named and name == "mamba":
        return  # no cache knows its offset, so the position is 0: as documented
    generator = speculative if drafted else plain
    caches = make_prompt_cache(model)
    options: dict[str, Any] = {"sampling": SAMPLED, "prompt_cache": caches}
    stream = generator.stream(PROMPT, max_tokens=50 if close else 9, **options)
    for _ in range(9):
        next(stream)
    stream.close()
    first = stream.result
    done = len(first.cached_tokens) - len(PROMPT)
    assert first.next_token is not None
    second = generator.generate(
        [first.next_token],
        max_tokens=20,
        cached_tokens=first.cached_tokens if named else None,
        **options,
    )
    assert [first.next_token, *second.tokens] == text[done : done + 21]


def test_two_open_streams_of_one_generator_are_independent() -> None:
    model = build("qwen3_5")
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=build("qwen3_5"))
    other = [9, 8, 7]
    expected = [generator.generate(p, max_tokens=25).tokens for p in (PROMPT, other)]
    streams = [generator.stream(p, max_tokens=25) for p in (PROMPT, other)]
    got: list[list[int]] = [[], []]
    for _ in range(25):
        for stream, tokens in zip(streams, got, strict=True):
            tokens.append(next(stream).token)
    assert got == expected


@pytest.mark.parametrize("drafted", [False, True])
def test_a_stop_token_ends_the_tokens_and_not_the_text(drafted: bool) -> None:
    model, plain, speculative, text = pair("llama", right=1.0)
    generator = speculative if drafted else plain
    for index in range(1, 9):  # also inside of accepted drafts
        if text[index] in text[:index]:
            continue
        caches = make_prompt_cache(model)
        result = generator.generate(
            PROMPT,
            max_tokens=40,
            sampling=SAMPLED,
            stop_tokens=[text[index]],
            prompt_cache=caches,
        )
        assert result.tokens == text[: index + 1]
        assert result.finish_reason == "stop"
        assert result.next_token == text[index + 1]
        assert result.cached_tokens == PROMPT + result.tokens
        _assert_holds("llama", caches, result.cached_tokens)
        before = generator.generate(PROMPT, max_tokens=index, sampling=SAMPLED)
        assert result.text == before.text


@cache
def _written() -> str:
    _, plain, _ = known("llama")
    text: str = plain.generate(PROMPT, max_tokens=60, sampling=SAMPLED).text
    return text


@given(
    cut=st.integers(2, 40),
    length=st.integers(1, 4),
    drafted=st.booleans(),
)
@settings(max_examples=12)
def test_a_stop_string_cuts_the_text_before_it(
    cut: int, length: int, drafted: bool
) -> None:
    model, plain, speculative, _ = pair("llama")
    generator = speculative if drafted else plain
    text = _written()
    stop = text[cut : cut + length]
    caches = make_prompt_cache(model)
    stream = generator.stream(
        PROMPT,
        max_tokens=60,
        sampling=SAMPLED,
        stop=["never in the text", stop],
        prompt_cache=caches,
    )
    shown = "".join(chunk.text for chunk in stream)
    assert shown == text[: text.index(stop)]
    result = stream.result
    assert result.text == shown
    assert result.finish_reason == "stop"
    assert result.cached_tokens == PROMPT + result.tokens
    _assert_holds("llama", caches, result.cached_tokens)


@pytest.mark.parametrize("k", [1, 4, 7])
def test_the_budget_is_kept_whatever_the_draft_length(k: int) -> None:
    _, _, speculative, text = pair("llama", right=1.0)
    for budget in range(10):
        result = speculative.generate(
            PROMPT, max_tokens=budget, sampling=SAMPLED, draft_length=k
        )
        assert result.tokens == text[:budget]
        assert result.stats.emitted == budget


def test_statistics_count_what_the_terms_say() -> None:
    _, _, speculative, _ = pair("llama", right=1.0)
    stats = speculative.generate(PROMPT, max_tokens=20, sampling=SAMPLED).stats
    assert (stats.rounds, stats.drafts, stats.drafted, stats.accepted) == (4, 4, 16, 16)
    assert stats.acceptance_rate == 1.0
    assert stats.mean_accepted_length == 5.0
    assert stats.tokens_per_round == 5.0
    assert stats.accepted_per_position == (1.0, 1.0, 1.0, 1.0)
    _, plain, wrong, _ = pair("llama", right=0.0)
    stats = wrong.generate(PROMPT, max_tokens=20, sampling=SAMPLED).stats
    assert (stats.accepted, stats.mean_accepted_length) == (0, 1.0)
    assert stats.rounds == 20
    assert stats.accepted_per_position == (0.0, 0.0, 0.0, 0.0)
    stats = plain.generate(PROMPT, max_tokens=20, sampling=SAMPLED).stats
    assert (stats.rounds, stats.drafts, stats.emitted) == (20, 0, 20)
    assert stats.mean_accepted_length == 1.0
    assert stats.tokens_per_second > 0


def test_a_stream_keeps_its_generator_and_so_the_recorders() -> None:
    model = build("qwen3_5")
    stream = SpeculativeGenerator(
        model, byte_tokenizer(), draft=build("qwen3_5", seed=3)
    ).stream(PROMPT, max_tokens=12)
    gc.collect()
    list(stream)
    assert stream.stats.accepted < stream.stats.drafted
    assert stream.stats.reruns == 0


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5"])
def test_nothing_old_waits_for_the_garbage_collector(name: str) -> None:
    """Old windows, states and inputs would accumulate until the collector runs."""
    _, _, speculative, _ = pair(name)
    kinds = (Stream, LaneRound, Speculation, RecordingArraysCache, PresentedRing)
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(o), kinds) for o in gc.get_objects())
        for _ in range(2):
            speculative.generate(PROMPT, max_tokens=30, sampling=SAMPLED)
            stream = speculative.stream(PROMPT, max_tokens=30, sampling=SAMPLED)
            next(stream)
            del stream
        after = sum(issubclass(type(o), kinds) for o in gc.get_objects())
    finally:
        gc.enable()
    assert after <= before


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_a_drafted_round_waits_for_the_device_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    generator = SpeculativeGenerator(
        model, byte_tokenizer(), draft=build(name, seed=7), draft_length=3
    )
    stream = generator.stream(PROMPT, max_tokens=30)
    next(stream)  # prefill waits too
    waits: list[str] = []

    def counted(owner: Any, wait: str) -> None:
        original = getattr(owner, wait)

        def wrapper(*args: Any) -> Any:
            waits.append(wait)
            return original(*args)

        monkeypatch.setattr(owner, wait, wrapper)

    counted(outcome, "outcomes")
    for wait in ("eval", "synchronize"):
        counted(mx, wait)
    before = stream.stats.rounds
    list(stream)
    # A round evaluates the draft, the logits and the tokens one by one, to time each,
    # and then reads its outcome. The last round can lack room for a draft.
    reads = waits.count("outcomes")
    assert reads == stream.stats.rounds - before
    drafted, plain = [*["eval"] * 3, "outcomes"], ["eval", "outcomes"]
    some = drafted * (reads - 1)
    assert waits in (some + drafted, some + plain)


def test_a_drawn_seed_is_reported_and_repeats_the_text() -> None:
    _, plain, _, _ = pair("llama")
    sampling = Sampling(temperature=1.0)
    first = plain.generate(PROMPT, max_tokens=20, sampling=sampling)
    again = plain.generate(
        PROMPT, max_tokens=20, sampling=Sampling(temperature=1.0, seed=first.seed)
    )
    other = plain.generate(PROMPT, max_tokens=20, sampling=sampling)
    assert again.tokens == first.tokens
    assert other.seed != first.seed


def test_a_cpu_reads_little_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert usual_prefill_step() == PREFILL_STEP
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert usual_prefill_step() == 256


def test_chunks_are_those_of_the_device_or_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = SpeculativeGenerator(build("llama"), byte_tokenizer(), draft="lookup")

    def chunks(size: int | None) -> list[int]:
        read: list[int] = []
        generator.generate(
            PROMPT * 29,
            prefill_step_size=size,
            max_tokens=1,
            prompt_progress=read.append,
        )
        assert sum(read) == 608  # the first round reads the last token
        return read

    assert chunks(100) == [100] * 6 + [8]
    assert chunks(None) == ([256, 256, 96] if mx.default_device() == mx.cpu else [608])


def _assert_holds(name: str, caches: list[Any], tokens: list[int]) -> None:
    """Assert that the caches continue like caches that were fed the tokens."""
    model = known(name)[0]
    offsets, expected = _fed(name, tuple(tokens))
    assert [getattr(c, "offset", 0) for c in caches] == offsets
    got = model(PROBE, cache=caches)
    differences = [
        mx.abs(one - other).max() for one, other in combinations(expected, 2)
    ]
    between = mx.stack([mx.array(0.0), *differences]).max()
    assert (mx.abs(got - expected[0]).max() <= 2 * between).item()


@cache
def _fed(name: str, tokens: tuple[int, ...]) -> tuple[list[int], list[mx.array]]:
    """Return offsets after the tokens, and the probe's logits for each chunk size."""
    model, offsets = known(name)[0], list[int]()
    logits = list[mx.array]()
    for step in (None,) if TINY_MODELS[name].bitwise else (1, 2, None):
        twin = make_prompt_cache(model)
        Lane(model, twin).feed(list(tokens), step=step)
        offsets = [getattr(c, "offset", 0) for c in twin]
        logits.append(model(PROBE, cache=twin))
    return offsets, logits
