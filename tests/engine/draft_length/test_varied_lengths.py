"""Draft lengths that change from round to round do not change the text."""

from functools import cache
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import (
    CascadeDraft,
    InvalidRequestError,
    LookupDraft,
    PrefixCache,
    SpeculativeGenerator,
)
from mlx_speculation.engine import Stream
from mlx_speculation.engine.draft_length import calibration
from mlx_speculation.engine.drafters.draft import HeadDraft
from mlx_speculation.engine.round.decoder import StreamDecoder
from mlx_speculation.engine.stream_factory import StreamFactory
from mlx_speculation.errors import SpeculationError
from mlx_speculation.samplers import Chooser
from support.covering import covering
from support.drafters.scripted_draft_lengths import CALIBRATED, Planned
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import GREEDY, SAMPLED, assert_same_text
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("measured")
MODELS = ("llama", "gemma3_text", "qwen3_5")
PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
TOKENS = 20
KINDS = ("model", "right", "random", "lookup")


@cache
def known(name: str, sampled: bool) -> tuple[nn.Module, list[int]]:
    model = build(name)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    sampling = SAMPLED if sampled else GREEDY
    return model, plain.generate(PROMPT, max_tokens=TOKENS, sampling=sampling).tokens


def drafted(kind: str, name: str, sampled: bool) -> SpeculativeGenerator:
    model, text = known(name, sampled)
    rights = {"right": 1.0, "random": 0.6}
    if kind == "lookup":
        noisy = [t if i % 7 else (t + 1) % 256 for i, t in enumerate(text)]
        draft: object = LookupDraft(corpus=[PROMPT + noisy])
    elif kind == "model":
        draft = build(name)
    else:
        draft = ScriptedDrafter(PROMPT + text, rights[kind], ragged=True, least=0)
    return SpeculativeGenerator(model, byte_tokenizer(), draft=draft)  # type: ignore[arg-type]


def run(generator: SpeculativeGenerator, lengths: Planned, sampled: bool) -> Stream:
    stream = generator.stream(
        PROMPT,
        max_tokens=TOKENS,
        sampling=SAMPLED if sampled else GREEDY,
        draft_length=lengths,
    )
    for _ in stream:
        pass
    return stream


@pytest.mark.parametrize(("name", "kind"), covering(MODELS, KINDS))
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=9), sampled=st.booleans()
)
@settings(max_examples=6)
def test_the_text_is_the_same(
    name: str, kind: str, lengths: list[int], sampled: bool
) -> None:
    model, text = known(name, sampled)
    planned = Planned(lengths)
    stream = run(drafted(kind, name, sampled), planned, sampled)
    sampling = SAMPLED if sampled else GREEDY
    assert_same_text(
        model,
        Chooser(sampling, 256),
        PROMPT,
        text,
        stream.result.tokens,
        width=planned.longest + 2,
        bitwise=name != "gemma3_text",
    )
    assert len(planned.noted) <= len(planned.planned) <= len(planned.noted) + 1
    # A plan's context can lack the token of a step in flight, which the caches hold.
    pairs = zip(planned.planned_contexts, planned.contexts, strict=False)
    assert all(
        abs(planned_context - context) <= 1 for planned_context, context in pairs
    )
    assert sum(o.drafted for _, o in planned.noted) == stream.stats.drafted
    assert sum(o.accepted for _, o in planned.noted) == stream.stats.accepted


def test_a_round_that_is_planned_asks_for_no_length() -> None:
    """Before such a round rank 0 sends "turn" to the other ranks, not a plan."""
    generator, run_round = drafted("random", "llama", False), StreamDecoder.next_round
    seen: set[bool] = set()
    for lengths in [3], [0], [0, 1], [0, 0, 1], [2, 0, 0, 1, 0, 2]:
        planned = Planned(lengths)

        def noting(
            decoder: StreamDecoder, *args: Any, planned: Planned = planned
        ) -> Any:
            known, before = decoder.planned, len(planned.planned_contexts)
            reason = run_round(decoder, *args)
            assert known == (len(planned.planned_contexts) == before)
            seen.add(known)
            return reason

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StreamDecoder, "next_round", noting)
            run(generator, planned, False)
    assert seen == {True, False}


@pytest.mark.parametrize("name", MODELS)
def test_the_callers_caches_hold_the_text_whatever_the_lengths(name: str) -> None:
    model, text = known(name, False)
    cache = make_prompt_cache(model)
    generator = drafted("random", name, False)
    first = generator.generate(
        PROMPT, max_tokens=17, prompt_cache=cache, draft_length=Planned([0, 2, 0, 0, 3])
    )
    assert first.next_token is not None
    more = generator.generate(
        [first.next_token],
        max_tokens=TOKENS - 18,
        prompt_cache=cache,
        cached_tokens=first.cached_tokens,
        draft_length=Planned([3, 0]),
    )
    assert [*first.tokens, first.next_token, *more.tokens] == text


def test_a_step_is_steady_only_between_two_others() -> None:
    """The first step was submitted by no other, and the last one submits none."""
    generator = SpeculativeGenerator(
        known("llama", False)[0],
        byte_tokenizer(),
        draft=ScriptedDrafter(PROMPT + known("llama", False)[1], 1.0),
    )
    planned = Planned([0, 0, 0, 2, 0, 2])
    run(generator, planned, False)
    seen = [(o.drafted, o.behind, o.ahead) for _, o in planned.noted[:6]]
    assert seen == [
        *[(0, False, True), (0, True, True), (0, True, False)],
        *[(2, False, False), (0, False, False), (2, False, False)],
    ]
    steady = [outcome.steady for _, outcome in planned.noted[:6]]
    assert steady == [False, True, False, False, False, False]
    # From the third round on, a length is planned for the context that the round has.
    steps = Planned([0])
    run(generator, steps, False)
    assert steps.planned_contexts[2 : len(steps.contexts)] == steps.contexts[2:] != []


def test_a_draft_behind_a_step_differs_from_others() -> None:
    """A round whose draft is empty is a plain step, which submits a further step.

    The lookup's next draft begins while that step is in flight.
    """
    generator = drafted("lookup", "llama", False)
    planned = Planned([4])
    run(generator, planned, False)
    kinds = {(o.drafted > 0, o.behind) for _, o in planned.noted}
    assert (True, True) in kinds


def test_adaptive_lengths_keep_the_text_and_explain_themselves() -> None:
    model, text = known("llama", False)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=build("qwen3"))
    stream = generator.stream(PROMPT, max_tokens=TOKENS, explain=True)
    for _ in stream:
        pass
    assert stream.result.tokens == text
    plans = [plan for plan, _ in stream.decisions]
    assert plans[0].reason == "measure"
    assert all(plan.length in CALIBRATED for plan in plans)
    assert len(plans) == stream.stats.rounds


def test_the_prompt_that_a_drafter_reads_counts_once() -> None:
    """A plain step comes first, so the first token does not wait for the reading."""
    stream = drafted("right", "llama", False).stream(
        PROMPT, max_tokens=TOKENS, draft_length=3, explain=True
    )
    for _ in stream:
        pass
    readings = [outcome.reading for _, outcome in stream.decisions]
    (reading_round,) = [number for number, reading in enumerate(readings) if reading]
    first = next(
        n for n, (_, outcome) in enumerate(stream.decisions) if outcome.drafted
    )
    assert reading_round == first
    assert readings[reading_round] < stream.stats.prefill_seconds


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_draft_is_longer_than_a_request_wants(most: int) -> None:
    _, text = known("llama", False)
    measured = drafted("right", "llama", False).stream(
        PROMPT, max_tokens=TOKENS, max_draft=most, explain=True
    )
    for _ in measured:
        pass
    assert measured.result.tokens == text
    # Below this limit the measured times decide.
    assert max(plan.length for plan, _ in measured.decisions) <= most
    assert max(outcome.drafted for _, outcome in measured.decisions) <= most
    for length in (2, 8):
        fixed = drafted("right", "llama", False).stream(
            PROMPT, max_tokens=TOKENS, draft_length=length, max_draft=most, explain=True
        )
        for _ in fixed:
            pass
        longest = max(outcome.drafted for _, outcome in fixed.decisions)
        assert longest == min(length, most)


def test_a_length_that_is_none_is_refused() -> None:
    generator = drafted("right", "llama", False)
    for wrong in (-1, True, 2.0):
        with pytest.raises(InvalidRequestError, match=f"max_draft is {wrong!r}"):
            generator.stream(PROMPT, max_draft=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="draft_length is a Planned"):
        generator.stream(PROMPT, draft_length=Planned([1]), max_draft=2)


def test_decisions_that_nobody_asked_for_are_not_kept() -> None:
    stream = drafted("model", "llama", False).stream(PROMPT, max_tokens=2)
    with pytest.raises(SpeculationError, match="explain=True"):
        _ = stream.decisions


@pytest.fixture(name="nothing_known")
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the costs that earlier runs have saved."""
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))


@pytest.mark.usefixtures("nothing_known")
def test_calibration_measures_every_length_and_keeps_it() -> None:
    model, small = build("llama"), build("llama")
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=small)
    reported: list[tuple[int, int]] = []
    table = generator.calibrate(
        contexts=[8, 9], progress=lambda done, total: reported.append((done, total))
    )
    half = len(reported) // 2
    assert reported[:half] == reported[half:]  # a phase for each context
    reported = reported[:half]
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert len({total for _, total in reported}) == 1
    assert 0.8 < reported[-1][0] / reported[-1][1] <= 1
    assert set(table) == {0}
    assert sorted(table[0]) == CALIBRATED
    assert all(seconds > 0 for seconds in table[0].values())
    other = SpeculativeGenerator(model, byte_tokenizer(), draft=small)
    stream = other.stream(PROMPT, max_tokens=TOKENS, explain=True)
    for _ in stream:
        pass
    reasons = [plan.reason for plan, _ in stream.decisions]
    assert reasons.count("measure") == 4  # until two rounds were `Feedback.steady`


@pytest.fixture(name="one_pass")
def _one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "PASSES", 1)


@pytest.mark.usefixtures("nothing_known", "one_pass")
def test_a_calibration_at_the_end_of_a_bucket_stays_in_it() -> None:
    """The text grows while it is measured."""
    model = build("llama")
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=build("llama"))
    table = generator.calibrate(contexts=[500])
    assert set(table) == {0}
    assert sorted(table[0]) == CALIBRATED


@pytest.mark.usefixtures("one_pass")
def test_a_lookup_is_calibrated_too() -> None:
    generator = SpeculativeGenerator(build("llama"), byte_tokenizer(), draft="lookup")
    table = generator.calibrate(contexts=[30])
    assert {0, 4, 8, 16} <= set(table[0])


def test_without_a_draft_there_is_nothing_to_calibrate() -> None:
    generator = SpeculativeGenerator(build("llama"), byte_tokenizer())
    with pytest.raises(InvalidRequestError, match="no draft"):
        generator.calibrate()


@pytest.mark.parametrize("contexts", [[], [0], [5, -1]])
def test_contexts_are_numbers_of_tokens(contexts: list[int]) -> None:
    generator = SpeculativeGenerator(build("llama"), byte_tokenizer(), draft="lookup")
    with pytest.raises(InvalidRequestError, match="contexts"):
        generator.calibrate(contexts)


@pytest.mark.usefixtures("one_pass")
def test_calibration_leaves_nothing_to_later_requests() -> None:
    """The calibration's text would displace useful entries of a prefix cache."""
    prefixes, lookup = PrefixCache(max_bytes=1 << 20), LookupDraft(history=999)
    generator = SpeculativeGenerator(
        build("llama"),
        byte_tokenizer(),
        draft=CascadeDraft(lookup, build("llama")),
        prefix_cache=prefixes,
    )
    generator.calibrate(contexts=[40])
    assert prefixes.nbytes == 0
    assert not any(each.tokens for each in lookup.places.history.generations)
    assert set(generator.calibrate(contexts=[8])[0]) >= {0, 4, 8}


def test_a_head_of_the_users_own_kind_needs_no_name() -> None:
    """The costs of such a head are kept in this process only."""

    class Own(HeadDraft):
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def open(self, *passed: object) -> ScriptedDrafter:
            return ScriptedDrafter(PROMPT + known("llama", False)[1], 1.0)

    model, text = known("llama", False)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=Own(model))
    assert generator.generate(PROMPT, max_tokens=TOKENS).tokens == text


def test_each_context_is_measured_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts: list[int] = []
    streams: list[Any] = []
    small = build("llama", seed=7)
    usual = StreamFactory.make

    def make(self: StreamFactory, prompt: Any, options: Any) -> Any:
        made = usual(self, prompt, options)
        prompts.append(len(prompt))
        streams.append(made)
        return made

    monkeypatch.setattr(StreamFactory, "make", make)
    generator = SpeculativeGenerator(build("llama"), byte_tokenizer(), draft=small)
    table = generator.calibrate(contexts=[8, 600])
    assert prompts == [8, 8, 600]  # the first text measures parts of a forward
    assert [stream.stats.rounds for stream in streams] == [26, 72, 72]
    assert table[0] != table[1]


def test_a_calibration_says_where_the_time_of_rounds_goes() -> None:
    model, small = build("llama"), build("llama", seed=7)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=small)
    table = generator.calibrate(contexts=[8])
    parts = generator.round_parts
    assert parts.keys() == table.keys()
    assert parts[0].keys() == table[0].keys()
    for length, one in parts[0].items():
        assert one.verify > 0
        assert one.host > 0
        assert (one.draft > 0) == (length > 0)
        assert 0.3 * table[0][length] < one.total < 3 * table[0][length]
    assert parts[0][8].draft > parts[0][1].draft
    again = SpeculativeGenerator(model, byte_tokenizer(), draft=small)
    assert again.round_parts == parts
