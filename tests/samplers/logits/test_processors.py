"""Processors over verify rows get the calls of plain decoding, and no others."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.samplers import (
    Chooser,
    ForkableProcessor,
    Rows,
    Sampling,
    pure,
)
from mlx_speculation.samplers.logits.processors import Processors
from support.sampling.scripted_rows import (
    VOCAB,
    Forkable,
    Recorder,
    alternating,
    draft_tokens,
    plain_text,
    scripted,
    scripted_rows,
    sequential,
    verify,
)

KINDS: dict[str, Callable[[], Any]] = {
    "pure": lambda: alternating,
    "mlx-lm's": lambda: make_logits_processors(repetition_penalty=1.5)[0],
    "forkable": Forkable,
    "serial": Recorder,
}

# (right or wrong for each drafted token, number of rows after which a first try of the
# round fails; None: no try fails)
ROUNDS = st.lists(
    st.tuples(st.lists(st.booleans(), max_size=4), st.none() | st.integers(1, 6)),
    min_size=1,
    max_size=6,
)


def a_chooser(sampling: Sampling, kinds: list[str]) -> tuple[Chooser, list[Any]]:
    processors = [KINDS[kind]() for kind in kinds]
    return Chooser(replace(sampling, logits_processors=processors), VOCAB), processors


def records(processors: list[Any]) -> list[Any]:
    return [(p.state, p.calls) for p in processors if isinstance(p, Recorder)]


@given(
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3),
    rounds=ROUNDS,
    temperature=st.sampled_from([0.0, 1.0]),
    penalty=st.sampled_from([None, 1.2]),
    seed=st.integers(0, 1000),
)
def test_rounds_make_the_calls_of_plain_decoding(
    kinds: list[str],
    rounds: list[tuple[list[bool], int | None]],
    temperature: float,
    penalty: float | None,
    seed: int,
) -> None:
    """Text, calls and states are the same with rejected drafts and failed rounds.

    A serial processor cannot take back the calls of a failed round. These calls belong
    to the text that the next round emits, and are not made again.
    """
    sampling = Sampling(
        temperature=temperature, top_k=6, presence_penalty=penalty, seed=seed
    )
    prompt = [1, 2, 3]
    longest = sum(len(right) + 2 for right, _ in rounds)
    plainly, its_own = a_chooser(sampling, kinds)
    expected = plain_text(plainly, prompt, longest)
    every = [p.calls for p in its_own if isinstance(p, Recorder)]
    chooser, processors = a_chooser(sampling, kinds)
    recorders = [p for p in processors if isinstance(p, Recorder)]
    furthest = 0
    text = list(prompt)
    for right, fail_at in rounds:
        next_tokens = expected[len(text) :]
        oracle = [
            token if is_right else None
            for token, is_right in zip(next_tokens, right, strict=False)
        ]
        states = records(processors)
        drafted = draft_tokens(chooser, text, oracle)
        assert records(processors) == states
        if fail_at is not None:
            assert verify(chooser, text, drafted, fail_at) == []
            furthest = len(text) - len(prompt) + min(fail_at, len(drafted) + 1)
            drafted = draft_tokens(chooser, text, [*oracle[:-1], None])
        text += verify(chooser, text, drafted, None)
        assert text == expected[: len(text)]
        emitted = len(text) - len(prompt)
        for recorder, calls in zip(recorders, every, strict=True):
            count = len(recorder.calls)
            assert recorder.calls == calls[:count]
            if isinstance(recorder, Forkable):
                assert count == emitted
            else:
                assert emitted <= count <= max(emitted, furthest)


def test_a_stop_token_is_the_last_to_be_called_for() -> None:
    recorder = Recorder()
    sampling = Sampling(logits_processors=(recorder,), seed=0)
    text = plain_text(Chooser(sampling, VOCAB), [1], 4)[1:]
    recorder.calls.clear()
    chooser = Chooser(replace(sampling, logits_processors=(recorder,)), VOCAB)
    recorder.state = 1
    rows = Rows([1], mx.array(text[:3], dtype=mx.uint32), 4)
    tokens = sequential(chooser, scripted_rows([1], text[:3]), rows)
    assert [next(tokens), next(tokens)] == text[:2]
    assert [tokens for tokens, _ in recorder.calls] == [[1], [1, text[0]]]


def test_forkable_processors_see_drafts_on_a_copy_of_their_state() -> None:
    """A draft's row gets the state after the drafts before it in the round."""
    chooser, (processor,) = a_chooser(Sampling(seed=0), ["forkable"])
    text = plain_text(chooser, [1], 2)
    before = processor.copy_state()
    drafted = draft_tokens(chooser, text, [None, 4, None])
    assert processor.copy_state() == before
    twin = Forkable()
    twin.restore_state(before)
    again: list[int] = []
    for token in drafted:
        logits = mx.array(scripted([*text, *again], script=1))[None]
        processed = twin(mx.array([*text, *again]), logits)
        if len(again) != 1:
            assert mx.argmax(processed).item() == token
        again.append(token)


def test_a_draft_after_a_step_in_flight_starts_before_it() -> None:
    """The step's token is not known yet; the first draft token stands for it."""
    chooser, (processor,) = a_chooser(Sampling(seed=0), ["forkable"])
    text = plain_text(chooser, [1], 2)
    drafted = draft_tokens(chooser, text, [None, None])
    chooser.choose(scripted_rows(text, []), Rows(text))
    after = processor.copy_state()
    assert draft_tokens(chooser, text, [None, None]) == drafted
    assert processor.copy_state() == after


def test_a_draft_that_begins_later_knows_nothing_of_the_draft_before() -> None:
    """A lookup made the first draft tokens, without logits."""
    chooser, (processor,) = a_chooser(Sampling(seed=0), ["forkable"])
    draft_tokens(chooser, [1], [None] * 5)
    text = [1, *verify(chooser, [1], [], None)]
    state = processor.state
    processor.calls.clear()
    ahead = Rows(text, mx.array([4, 5], dtype=mx.uint32))
    logits = mx.array(scripted([*text, 4, 5]))[None]
    got = chooser.processed(logits, ahead, for_draft=True)
    twin = Forkable()
    twin.state = state
    expected = twin(mx.array([*text, 4, 5]), mx.array(logits))
    assert mx.array_equal(got, expected).item()


@pytest.mark.parametrize("width", [6, VOCAB, 14])
def test_processors_see_a_drafts_logits_at_the_targets_width(width: int) -> None:
    seen = []

    @pure
    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(logits)
        return logits + 1

    processors = Processors(Sampling(logits_processors=[look]), VOCAB)
    logits = mx.arange(width, dtype=mx.float32)[None]
    got = processors.for_draft(logits, Rows([3]))
    assert got.tolist() == (logits[:, :VOCAB] + 1).tolist()
    expected = [float(i) if i < width else -mx.inf for i in range(VOCAB)]
    assert seen[0].tolist() == [expected]


def test_processors_get_a_copy_of_their_row_and_of_the_text() -> None:
    """An mlx-lm processor writes in place, which would change the other rows."""

    @pure
    def overwrite(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:] = logits * 2
        tokens[:] = 0
        return logits

    processors = Processors(Sampling(logits_processors=[overwrite]), VOCAB)
    text = list(range(1, 301))
    for rows in (Rows(text), Rows(text, mx.array([5, 6], dtype=mx.uint32), 3)):
        logits = mx.random.normal((rows.count, VOCAB), key=mx.random.key(0))
        got = processors.apply(logits, rows)
        assert mx.array_equal(got, logits * 2).item()
        kept: Any = rows.prefixes(processors._known)[-1].tolist()
        assert kept[:300] == text


def test_what_keeps_rows_from_going_together_is_named() -> None:
    assert Processors(Sampling(), VOCAB).parallel
    assert not Processors(Sampling(), VOCAB).active
    for kind, (parallel, has_state) in {
        "pure": (True, False),
        "mlx-lm's": (True, False),
        "forkable": (True, True),
        "serial": (False, True),
    }.items():
        processors = a_chooser(Sampling(seed=0), [kind])[0].processors
        assert processors.active
        assert (processors.parallel, processors.has_state) == (parallel, has_state)
    assert isinstance(Forkable(), ForkableProcessor)
    assert not isinstance(Recorder(), ForkableProcessor)
    assert Processors(Sampling(logits_processors=[pure(Forkable())]), 9).parallel
    assert Processors(Sampling(presence_penalty=1.0), VOCAB).active


def test_pure_keeps_the_name_and_refuses_what_cannot_be_called() -> None:
    assert getattr(alternating, "__name__", "") == "alternating"
    recorder = Recorder()
    # `pure` gives its own object an attribute of this name
    recorder._processor = None  # type: ignore[attr-defined]
    assert pure(recorder)(mx.array([1]), mx.zeros((1, VOCAB))).shape == (1, VOCAB)
    with pytest.raises(InvalidRequestError, match=r"pure\(\) was given a int"):
        pure(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "processor",
    [
        lambda tokens, logits: None,
        lambda tokens, logits: logits[0],
        lambda tokens, logits: logits[:, :-1],
    ],
)
def test_a_processor_that_returns_no_logits_is_named(processor: Any) -> None:
    processors = Processors(Sampling(logits_processors=[pure(processor)]), VOCAB)
    with pytest.raises(InvalidRequestError, match=r"<lambda> returned .*\[1, 10\]"):
        processors.apply(mx.zeros((2, VOCAB)), Rows([1, 2], count=2))
    bare = partial(processor)
    serial = Processors(Sampling(logits_processors=[bare]), VOCAB)
    with pytest.raises(InvalidRequestError, match="processor partial returned"):
        next(serial.serial(mx.zeros((1, VOCAB)), Rows([1])))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logit_bias": {3: 1.0, 10: 2.0}}, "logit_bias has the id 10"),
        ({"xtc_special_tokens": [11]}, "xtc_special_tokens has the id 11"),
    ],
)
def test_ids_that_the_target_lacks_are_refused(
    options: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}, but .* up to 9"):
        Chooser(Sampling(seed=0, **options), 50, limit=10)
    Chooser(Sampling(seed=0, **options), 12)
