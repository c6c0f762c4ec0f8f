"""With every option and drafter, text and processors are as in plain decoding.

This includes log-probabilities, and the calls and final states of processors.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    InvalidRequestError,
    Sampling,
    SpeculativeGenerator,
    pure,
)
from mlx_speculation.engine import Stream
from mlx_speculation.engine.result import Result
from mlx_speculation.engine.round import outcome
from support.covering import covering
from support.drafters.scripted_draft_lengths import Planned
from support.drafters.scripted_drafter import ScriptedDrafter
from support.models.tiny_models import TINY_MODELS, build_tiny
from support.models.tiny_tokenizer import letter_tokenizer

VOCAB, TOKENS = 24, 14
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
TOLERANCE = 1e-4  # of log-probabilities: wider forwards round differently


@cache
def model_of(seed: int) -> nn.Module:
    tiny = TINY_MODELS["llama"]
    shallow = replace(tiny, args=tiny.args | {"num_hidden_layers": 2})
    return build_tiny(shallow, seed=seed, vocab=VOCAB)


class Counting:
    """Serial processor that penalizes token n in call n, and records its inputs."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls.append(tokens.tolist())  # type: ignore[arg-type]
        logits[:, len(self.calls) % VOCAB] -= 4.0
        return logits


class Forkable(Counting):
    def copy_state(self) -> Any:
        return list(self.calls)

    def restore_state(self, state: Any) -> None:
        self.calls = list(state)


@pure
def shy(tokens: mx.array, logits: mx.array) -> mx.array:
    """Penalize the token before the last one, in place."""
    logits[:, tokens[-2:-1]] -= 3.0
    return logits


USERS: dict[str, Callable[[], Any]] = {
    "pure": lambda: shy,
    "forkable": Forkable,
    "serial": Counting,
}

OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.2]),
        "seed": st.integers(0, 2**40),
    },
    optional={
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.02, 0.2]),
        "top_k": st.integers(1, VOCAB),
        "xtc_probability": st.sampled_from([0.5, 1.0]),
        "xtc_threshold": st.sampled_from([0.05, 0.2]),
        "repetition_penalty": st.sampled_from([0.8, 1.5]),
        "repetition_context_size": st.integers(1, 30),
        "presence_penalty": st.sampled_from([-1.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.3, 1.0]),
        "frequency_context_size": st.integers(1, 30),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), st.sampled_from([-5.0, 2.0, 9.0]), max_size=3
        ),
        "draft_temperature": st.sampled_from([0.0, 0.4, 2.0]),
    },
)
KINDS = ("draft model", "oracle", "wrong", "often right", "lookup")


def draft_of(kind: str, text: list[int]) -> Any:
    if kind == "draft model":
        return model_of(7)
    if kind == "lookup":
        return "lookup"
    right = {"oracle": 1.0, "wrong": 0.0, "often right": 0.7}[kind]
    return ScriptedDrafter(PROMPT + text, right, VOCAB, ragged=kind == "often right")


def generate(
    draft: Any,
    length: int | list[int],
    options: dict[str, Any],
    users: list[Any],
    **more: Any,
) -> Result:
    generator = SpeculativeGenerator(model_of(0), letter_tokenizer(VOCAB), draft=draft)
    return generator.generate(
        PROMPT,
        max_tokens=TOKENS,
        draft_length=Planned(length) if isinstance(length, list) else length,
        sampling=Sampling(**options, logits_processors=tuple(users)),
        logprobs=2,
        **{"stop_tokens": ()} | more,
    )


def assert_same(got: Result, expected: Result) -> None:
    assert got.tokens == expected.tokens
    assert got.finish_reason == expected.finish_reason
    assert got.logprobs is not None
    assert expected.logprobs is not None
    for one, other in zip(got.logprobs, expected.logprobs, strict=True):
        assert one.value == pytest.approx(other.value, abs=TOLERANCE)
        values = [value for _, value in other.top]
        assert [value for _, value in one.top] == pytest.approx(values, abs=TOLERANCE)


def check(
    options: dict[str, Any],
    kind: str,
    length: int | list[int],
    users: list[str],
    stops: set[int],
) -> Result:
    plain, ours = ([USERS[name]() for name in users] for _ in range(2))
    expected = generate(None, 0, options, plain, stop_tokens=stops)
    draft = draft_of(kind, expected.tokens)
    result = generate(draft, length, options, ours, stop_tokens=stops)
    assert_same(result, expected)
    count = len(expected.tokens)
    before = [PROMPT + expected.tokens[:i] for i in range(count)]
    for name, mine, theirs in zip(users, ours, plain, strict=True):
        if name == "serial":
            assert mine.calls == theirs.calls == before
        elif name == "forkable":  # a step that was submitted ahead can add a call
            assert mine.calls[:count] == theirs.calls[:count] == before
            assert len(mine.calls) - count in (0, 1)
    return result


def test_a_draft_after_the_end_of_a_text_leaves_no_call() -> None:
    """A draft may be verified before the host reads the token that ends the text."""
    check({"temperature": 0.0, "seed": 0}, "lookup", 1, ["forkable"], {1})


@given(
    options=OPTIONS,
    kind=st.sampled_from(KINDS),
    length=st.integers(0, 8) | st.lists(st.integers(0, 6), min_size=2, max_size=6),
    users=st.sampled_from([[], ["pure"], ["forkable"], ["serial"], ["serial", "pure"]]),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=2),
)
def test_any_drafter_leaves_text_calls_and_log_probabilities(
    options: dict[str, Any],
    kind: str,
    length: int | list[int],
    users: list[str],
    stops: set[int],
) -> None:
    check(options, kind, length, users, stops)


@pytest.mark.parametrize(
    ("user", "kind", "temperature"),
    covering(USERS, KINDS, (0.0, 0.9), pairs=[(0, 1)]),
)
def test_rejected_rows_leave_no_trace_in_a_processor(
    user: str, kind: str, temperature: float
) -> None:
    options = {"temperature": temperature, "seed": 1, "repetition_penalty": 1.2}
    result = check(options, kind, 4, [user], set())
    assert result.stats.drafted > result.stats.accepted or kind in ("oracle", "lookup")
    for stop in result.tokens[6:7]:  # in the middle of an accepted draft
        check(options, kind, 4, [user], {stop})


@pytest.mark.parametrize("kind", ["oracle", "often right"])
def test_holding_all_tokens_asks_no_serial_processor(kind: str) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 1}
    expected = generate(None, 0, options, [Counting()]).tokens
    processor, caches = Counting(), make_prompt_cache(model_of(0))
    result = generate(
        draft_of(kind, expected), 4, options, [processor], prompt_cache=caches
    )
    assert result.tokens == expected
    assert len(processor.calls) == TOKENS
    assert result.cached_tokens == PROMPT + expected
    assert caches[0].offset == len(PROMPT) + TOKENS
    assert result.next_token is None


def stream_with(kind: str, text: list[int], processor: Any) -> Stream:
    generator = SpeculativeGenerator(
        model_of(0),
        letter_tokenizer(VOCAB),
        draft=draft_of(kind, text),
        draft_length=3,
    )
    sampling = Sampling(temperature=0.7, seed=1, logits_processors=(processor,))
    return generator.stream(
        PROMPT, max_tokens=TOKENS, sampling=sampling, stop_tokens=()
    )


@pytest.mark.parametrize("kind", ["oracle", "often right"])
def test_a_failed_round_puts_a_forkable_state_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, processor = Forkable(), Forkable()
    expected = generate(None, 0, {"temperature": 0.7, "seed": 1}, [plain]).tokens
    stream = stream_with(kind, expected, processor)
    emitted = [next(stream).token]
    while emitted != expected[: stream.stats.emitted]:
        emitted.append(next(stream).token)  # up to the end of a round

    def broken(*_: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(outcome, "outcomes", broken)
    with pytest.raises(RuntimeError, match="device lost"):
        next(stream)
    assert processor.calls == plain.calls[: len(emitted)]


def test_sequential_rounds_without_a_draft_read_nothing_beside_their_token() -> None:
    stats = generate(None, 0, {}, [USERS["serial"]()]).stats
    assert stats.rounds == TOKENS
    assert stats.reads == 0


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("users", [[], ["pure"], ["forkable"], ["serial"]])
def test_other_rules_repeat_their_text_and_end_like_it(
    acceptance: Any, users: list[str]
) -> None:
    def run() -> tuple[Result, list[Any]]:
        processors = [USERS[name]() for name in users]
        generator = SpeculativeGenerator(
            model_of(0),
            letter_tokenizer(VOCAB),
            draft=model_of(7),
            draft_length=3,
            acceptance=acceptance,
        )
        sampling = Sampling(
            temperature=0.9, seed=4, logits_processors=tuple(processors)
        )
        result = generator.generate(
            PROMPT, max_tokens=TOKENS, sampling=sampling, stop_tokens=()
        )
        return result, processors

    if users == ["serial"] and acceptance == "block":
        with pytest.raises(InvalidRequestError, match=r"'block'.*pure"):
            run()
        return
    (one, processors), (other, _) = run(), run()
    assert one.tokens == other.tokens
    assert one.stats.accepted > 0
    if users == ["serial"]:
        text = PROMPT + one.tokens
        calls = [text[: len(PROMPT) + i] for i in range(TOKENS)]
        assert processors[0].calls == calls
        assert one.stats.rounds < TOKENS
        # In a round the host waits for the draft, and for each token but the last.
        assert one.stats.reads == TOKENS


class FailsOnce(Counting):
    def __init__(self, call: int) -> None:
        super().__init__()
        self._call: int | None = call

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if len(self.calls) == self._call:
            self._call = None
            raise RuntimeError("the processor failed")
        return super().__call__(tokens, logits)


@pytest.mark.parametrize("call", [0, 1, 4, 7])
@pytest.mark.parametrize("kind", ["oracle", "often right"])
def test_a_processor_that_raises_ends_the_stream_and_the_caches_are_right(
    kind: str, call: int
) -> None:
    plain, processor = Counting(), FailsOnce(call)
    expected = generate(None, 0, {"temperature": 0.7, "seed": 1}, [plain])
    stream = stream_with(kind, expected.tokens, processor)
    with pytest.raises(RuntimeError, match="the processor failed"):
        list(stream)
    assert stream.result.finish_reason == "error"
    assert stream.result.tokens == expected.tokens[: len(stream.result.tokens)]
    assert len(stream.result.tokens) <= call
    assert processor.calls == plain.calls[:call]
