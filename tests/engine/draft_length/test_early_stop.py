"""Drafts that end early: where they do, what is learnt, and the text as it was.

Faults that were made by hand, and found here:
    a chain ends at a token that is worth its time, or goes on behind one that is not;
    the first token can end it; tokens at its end are not verified; their certainties
    are not told; certainties of rounds behind a step are told; a read is not counted;
    classes learn from tokens behind a rejected one; averages of all classes are one;
    the line through the costs ignores how dear a round is, or is not one; drafts end
    early above temperature 0, on a GPU, with a length that was named, or a confidence;
    a drafter that asks nobody is asked for 16 tokens; a cascade gives all its drafters
    the first one's stop
"""

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation import (
    Cascade,
    LookupDrafter,
    Sampling,
    SpeculativeGenerator,
    demo_models,
    load,
)
from mlx_speculation.demo import demo_prompts
from mlx_speculation.engine import AssistantDraft, EagleDraft, MtpDraft
from mlx_speculation.engine.draft_length import policy_factory as measured_module
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.adaptive import AdaptiveLengths
from mlx_speculation.engine.draft_length.base import Option, Outcome, Plan
from mlx_speculation.engine.draft_length.calibration import ConstantDrafter
from mlx_speculation.engine.draft_length.costs import RoundCosts, worth_of_time
from mlx_speculation.engine.draft_length.policy_factory import PolicyFactory
from mlx_speculation.engine.drafters.base import Choose, Draft
from mlx_speculation.engine.drafters.draft_model import DraftModel
from mlx_speculation.engine.drafters.early_stop import (
    EDGES,
    GUESSED,
    Certainties,
    Stop,
)
from mlx_speculation.engine.drafters.fault_guard import FaultGuard
from mlx_speculation.engine.drafters.resolve import resolve
from mlx_speculation.engine.drafters.source import TargetInfo
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.decoder import Decoder
from mlx_speculation.engine.round.outcome import RoundOutcome
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.stats import DrafterFault
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Chooser, Verifier
from support import usual_length
from support.caches.contents import assert_same_content, content
from support.covering import covering
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import GREEDY, SAMPLED
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
LONGEST = 6
probabilities = st.floats(0, 1, allow_nan=False)


class Ending:
    """Plans drafts that end early, and keeps what became of them."""

    longest = LONGEST

    def __init__(self, stop: Stop, every: int = 1) -> None:
        self.stop, self._every, self._planned = stop, every, 0
        self.noted: list[Outcome] = []

    def plan(self, context: int, limit: int) -> Plan:
        self._planned += 1
        drafts = self._planned % self._every == 0
        length = min(LONGEST, limit) if drafts else 0
        return Plan(max(0, length), "best", stop=self.stop if drafts else None)

    def note(self, context: int, plan: Plan, outcome: Outcome) -> None:
        self.noted.append(outcome)

    def end(self) -> None:
        """Do nothing."""


def all_of(outcome: RoundOutcome) -> RoundOutcome:
    return outcome


def certain(model: nn.Module, tokens: list[int]) -> list[tuple[float, int]]:
    """Return the largest probability and the token of a whole greedy chain."""
    text, found = list(tokens), []
    for _ in range(LONGEST):
        logits = model(mx.array([text]))[0, -1].astype(mx.float32)
        largest = math.exp(float(logits.max() - mx.logsumexp(logits)))
        found.append((largest, int(mx.argmax(logits))))
        text.append(found[-1][1])
    return found


@given(st.lists(probabilities, max_size=9), probabilities)
def test_a_chain_is_kept_up_to_the_first_token_that_is_reached_too_seldom(
    certainties: list[float], least: float
) -> None:
    known = Certainties()
    reached = np.cumprod([known.accepted(each) for each in certainties])
    kept = Stop(least, known).kept(certainties)
    assert kept == next(
        (n for n in range(1, len(reached)) if reached[n] < least), len(reached)
    )


@given(st.lists(st.tuples(st.lists(probabilities, max_size=5), st.integers(0, 5))))
def test_classes_learn_from_tokens_up_to_the_first_rejected_one(
    drafts: list[tuple[list[float], int]],
) -> None:
    known = Certainties()
    seen: dict[int, list[float]] = {}
    for certainties, count in drafts:
        accepted = min(count, len(certainties))
        known.note(certainties, accepted)
        for index, certainty in enumerate(certainties[: accepted + 1]):
            place = int(np.searchsorted(EDGES, certainty, side="right"))
            seen.setdefault(place, []).append(float(index < accepted))
    ends = (0.0, *EDGES, 1.0)
    for place, (low, high) in enumerate(pairwise(ends)):
        tries, hits = GUESSED, GUESSED * (low + high) / 2
        for hit in seen.get(place, []):
            tries, hits = 0.99 * tries + 1, 0.99 * hits + hit
        assert known.accepted(low) == pytest.approx(hits / tries)


@pytest.mark.parametrize("least", [1e-9, 0.001, 0.3, 0.6, 2.0])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_chain_ends_where_its_tokens_are_not_worth_their_time(
    name: str, least: float
) -> None:
    """Of a model that drafts for itself all tokens are right, sure or not."""
    model = build(name)
    owner = SpeculativeGenerator(model, byte_tokenizer())  # installs recorders
    known = Certainties([1.0] * 12, [0.05 + n / 12 for n in range(12)])
    lengths = Ending(Stop(least, known))
    sequence, drafter = Sequence(list(PROMPT)), DraftModel(lambda: Lane(model))
    faults: list[DrafterFault] = []
    decoder = Decoder(
        Request(
            target=Lane(model),
            sequence=sequence,
            verifier=Verifier(Chooser(GREEDY, 256)),
            drafter=FaultGuard(drafter, faults.append),
            policy=lengths,
        )
    )
    decoder.prefill.target()
    drafted = set()
    for _ in range(6):
        chain = certain(model, sequence.tokens)
        reached = np.cumprod([known.accepted(largest) for largest, _ in chain])
        below = (n for n in range(1, LONGEST) if reached[n] < least)
        kept = next(below, LONGEST)
        reads, begun = decoder.request.statistics.reads, len(sequence.tokens)
        decoder.next_round(99, all_of)
        outcome = lengths.noted[-1]
        # The token that is not worth its time ends it, and one is computed meanwhile.
        expected = min(kept + 2, LONGEST)
        drafted.add(expected)
        assert outcome.drafted == outcome.accepted == expected
        shown = [largest for largest, _ in chain[:expected]]
        assert outcome.certainties == pytest.approx(shown, rel=1e-3)
        said = [token for _, token in chain[:expected]]
        assert sequence.tokens[begun : begun + expected] == said
        # One wait for each token but the newest: it was computed meanwhile.
        assert decoder.request.statistics.reads - reads == expected - 1
        twin = Lane(model)
        twin.feed(sequence.tokens[: drafter.lane.seen], step=1)
        assert_same_content(content(twin.caches), content(drafter.lane.caches))
    if least in (1e-9, 2.0):
        assert drafted == {LONGEST if least < 1 else 3}
    assert not faults
    del owner


@cache
def demo(name: str) -> tuple[nn.Module, Any]:
    """Return a bundled model and its tokenizer."""
    return load(demo_models()[name])


def demo_draft(kind: str, target: str) -> Any:
    """Return a trained draft of a bundled target."""
    model, _ = demo(target)
    if kind == "model":
        return demo("draft")[0]
    if kind == "cascade":
        return Cascade(LookupDrafter(minimum_match=6), demo("draft")[0])
    if kind == "mtp":
        return MtpDraft.from_folder(demo_models()[target], model)
    make: Any = {"eagle": EagleDraft, "assistant": AssistantDraft}[kind]
    return make.from_folder(demo_models()[kind], model)


PAIRS = (
    ("model", "dense"),
    ("model", "hybrid"),
    ("eagle", "dense"),
    ("assistant", "sliding"),
    ("mtp", "hybrid"),
)


@pytest.mark.parametrize(
    ("pair", "sampling", "every"), covering(PAIRS, (GREEDY, SAMPLED), (1, 3))
)
def test_the_text_is_plain_decodings_and_unsure_drafts_are_short(
    pair: tuple[str, str], sampling: Sampling, every: int
) -> None:
    """Every third round drafts, or all do."""
    kind, target = pair
    model, tokenizer = demo(target)
    generator = SpeculativeGenerator(
        model, tokenizer, draft=demo_draft(kind, target), acceptance="keyed"
    )
    prompt = next(p.text for p in demo_prompts() if p.group == "prose")[:120]
    lengths = Ending(Stop(0.3, Certainties()), every)
    options: dict[str, Any] = {"max_tokens": 24, "sampling": sampling}
    plain = generator.generate(prompt, draft_length=0, **options)
    result = generator.generate(prompt, draft_length=lengths, **options)
    assert result.tokens == plain.tokens
    assert not result.stats.drafter_faults
    drafts = [each for each in lengths.noted if each.drafted]
    assert {each.drafted for each in drafts} - {LONGEST}
    for outcome in lengths.noted:
        assert bool(outcome.certainties) == (outcome.drafted > 0 and not outcome.behind)
    for outcome in drafts:
        assert len(outcome.certainties) in (0, outcome.drafted)
    # Of a chain's last token nobody asks whether it is worth its time.
    assert result.stats.reads == sum(outcome.drafted - 1 for outcome in drafts)


class Seldom:
    """Proposes nothing every second time, so that the next draft is behind a step."""

    def __init__(self, drafter: DraftModel) -> None:
        self._drafter, self._calls = drafter, 0

    def begin(self, sequence: Sequence) -> None:
        self._drafter.begin(sequence)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        self._calls += 1
        if self._calls % 2:
            return Draft(mx.array([], mx.uint32))
        return self._drafter.propose(sequence, limit, choose)

    def settle(self, accepted: int) -> None:
        self._drafter.settle(accepted)

    def discard(self) -> None:
        if self._calls % 2 == 0:
            self._drafter.discard()


@pytest.mark.parametrize("least", [0.001, 0.05])
def test_behind_a_step_nothing_is_learnt_of_what_was_drafted(least: float) -> None:
    """There the first token is the step's, and the others are judged with it."""
    model = build("llama")
    drafter = Seldom(DraftModel(lambda: Lane(model)))
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=drafter)
    known = Certainties([1.0] * 12, [0.05 + n / 12 for n in range(12)])
    lengths = Ending(Stop(least, known))
    text = generator.generate(PROMPT, max_tokens=50, draft_length=lengths).tokens
    assert text == generator.generate(PROMPT, max_tokens=50, draft_length=0).tokens
    behind = [each for each in lengths.noted if each.behind and each.drafted]
    assert len(behind) > 3
    for outcome in behind:
        assert outcome.certainties == ()


def test_each_drafter_of_a_cascade_ends_where_its_own_policy_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usual_length, "USUAL", None)
    monkeypatch.setenv("MLX_SPECULATION_CACHE", "")
    model, tokenizer = demo("dense")
    cascade = demo_draft("cascade", "dense")
    generator = SpeculativeGenerator(model, tokenizer, draft=cascade)
    costs = {n: 1 + 0.3 * n for n in range(17)}
    stream = generator.stream(
        "import os\nimport sys\n", max_tokens=60, explain=True, draft_length=None
    )
    policies: Any = stream.request.policy  # both have seen what rounds cost
    for policy in policies.policies:
        policy.costs.take(RoundCosts({0: costs}))
    text = [chunk.token for chunk in stream]
    assert (
        text
        == generator.generate(
            "import os\nimport sys\n", max_tokens=60, draft_length=0
        ).tokens
    )
    best = [plan for plan, _ in stream.decisions if plan.reason == "best"]
    lookups = [plan.each[0].stop for plan in best]
    models = [plan.each[1].stop for plan in best if plan.each[1].reason == "best"]
    assert best
    assert set(lookups) == {None}
    assert models
    assert None not in models
    assert any(outcome.certainties for _, outcome in stream.decisions)


@given(
    st.floats(0.5, 3),
    st.floats(0.01, 0.5),
    st.lists(probabilities, min_size=16),
)
def test_the_worth_of_time_is_that_of_the_fastest_on_a_straight_line(
    start: float, slope: float, rates: list[float]
) -> None:
    expected = AcceptanceRates(rates, 99.0).expected(16)
    seconds = [1.0, *(start + slope * n for n in range(1, 17))]
    options = list(map(Option, range(17), expected, seconds))
    fastest = max(option.speed for option in options)
    assert worth_of_time(options) == pytest.approx(fastest * slope)


def test_one_length_that_was_measured_in_a_bad_moment_changes_little() -> None:
    expected = AcceptanceRates([0.8] * 16, 99.0).expected(16)
    seconds = [1 + 0.25 * bool(n) + 0.15 * n for n in range(17)]
    usual = worth_of_time(list(map(Option, range(17), expected, seconds)))
    for bad in range(1, 17):
        noisy = [s * (1.7 if n == bad else 1.0) for n, s in enumerate(seconds)]
        found = worth_of_time(list(map(Option, range(17), expected, noisy)))
        assert 0.75 * usual < found < 1.3 * usual


COSTS = RoundCosts({0: {n: 1 + 0.25 * bool(n) + 0.15 * n for n in range(17)}})


def decided(certainties: Certainties | None, limit: int = 50) -> Plan:
    """Return the plan of a round whose drafts are right four times in five."""
    policy = AdaptiveLengths(
        COSTS, AcceptanceRates([0.8] * 16, 99.0), 16, certainties=certainties
    )
    policy.plan(100, limit)  # the first token
    return policy.plan(100, limit)


def test_a_draft_that_may_end_early_may_be_as_long_as_any() -> None:
    usual, early = decided(None), decided(Certainties())
    assert usual.reason == early.reason == "best"
    assert usual.stop is None
    assert 1 < usual.length < 16
    assert early.length == 16
    assert early.stop is not None
    assert 0 < early.stop.least < 1
    assert decided(Certainties(), limit=5).length == 5
    assert "at most 16 (best)" in str(early)
    assert "at most" not in str(usual)


def test_a_policy_learns_from_the_tokens_that_end_a_draft() -> None:
    """A rate is that of all tokens at its place, and not of the sure ones alone."""
    known = Certainties()
    policy = AdaptiveLengths(COSTS, AcceptanceRates(), 16, certainties=known)
    policy.plan(100, 50)
    plan = policy.plan(100, 50)
    for number in range(200):
        accepted = 3 if number % 4 == 0 else 2
        outcome = Outcome(3, accepted, 1.5, certainties=(0.97, 0.85, 0.45))
        policy.note(100, plan, outcome)
    rates = policy.rates.rates(3)
    assert min(rates[:2]) > 0.9
    assert rates[2] == pytest.approx(0.25, abs=0.08)
    assert known.accepted(0.45) == pytest.approx(0.25, abs=0.08)
    assert min(known.accepted(0.97), known.accepted(0.85)) > 0.95


def early_texts(seed: int, count: int) -> list[list[tuple[int, list[float]]]]:
    """Return texts: at each place how many drafts are right, and how sure they are."""
    random = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        sure = np.where(random.random((160, 16)) < 0.88, 0.97, 0.2)
        right = random.random((160, 16)) < sure
        texts.append(
            [
                (int(np.cumprod(row).sum()), [float(each) for each in some])
                for row, some in zip(right, sure, strict=True)
            ]
        )
    return texts


def speed(
    texts: list[list[tuple[int, list[float]]]],
    make: Callable[[], AdaptiveLengths | int],
) -> float:
    """Return tokens by plain steps; a draft that ends early is longer by two tokens."""
    tokens, seconds = 0, 0.0
    cost = {n: 1 + 0.25 * bool(n) + 0.15 * n for n in range(17)}
    for text in texts:
        policy, place = make(), 0
        while place < len(text):
            right, sure = text[place]
            if isinstance(policy, int):
                accepted, took = min(policy, right), cost[policy]
            else:
                plan = policy.plan(place, len(text))
                kept = plan.length
                if plan.stop is not None:
                    kept = plan.stop.kept(sure[: plan.length])
                    kept = min(kept + 2, plan.length)
                accepted = min(kept, right)
                took = cost[kept]
                outcome = Outcome(
                    kept,
                    accepted,
                    took,
                    behind=kept == 0,
                    ahead=kept == 0,
                    certainties=tuple(sure[:kept]) if plan.stop is not None else (),
                )
                policy.note(place, plan, outcome)
            tokens, seconds = tokens + accepted + 1, seconds + took
            place += accepted + 1
        if not isinstance(policy, int):
            policy.end()
    return tokens / seconds


def test_it_is_faster_than_the_best_fixed_length() -> None:
    texts, known, rates = early_texts(1, 8), Certainties(), AcceptanceRates()
    best = max(speed(texts, partial(int, n)) for n in range(17))

    def policy(certainties: Certainties | None) -> AdaptiveLengths:
        costs = RoundCosts(COSTS.table())
        return AdaptiveLengths(costs, rates, 16, certainties=certainties)

    assert speed(texts, partial(policy, known)) > 1.08 * best
    assert speed(texts, partial(policy, None)) < 1.02 * best


def lengths_of(draft: Any, **options: Any) -> PolicyFactory:
    """Return the lengths of a generator on a tiny target."""
    model = build("llama")
    source = resolve(draft, TargetInfo(model, byte_tokenizer(), None, 255)).source
    return PolicyFactory(model, source, "slack", None, **options)


def test_drafts_end_early_where_they_are_chosen_without_chance_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usual_length, "USUAL", None)
    monkeypatch.setenv("MLX_SPECULATION_CACHE", "")
    lengths = lengths_of(build("llama", seed=1))

    def early(lengths: PolicyFactory, **options: Any) -> bool:
        policy = lengths.for_stream(None, **options)
        return getattr(policy, "_certainties", None) is not None

    assert early(lengths, greedy=True)
    assert not early(lengths)
    assert not early(lengths, greedy=True, most=0)
    assert not early(lengths_of(build("llama", seed=1), early=False), greedy=True)
    for draft in (LookupDrafter(), ConstantDrafter(), ScriptedDrafter([], 1.0)):
        assert not early(lengths_of(draft), greedy=True)
    monkeypatch.setattr(measured_module, "on_cpu", lambda: False)
    assert not early(lengths, greedy=True)


def test_what_is_known_of_certainties_goes_from_stream_to_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usual_length, "USUAL", None)
    lengths = lengths_of(build("llama", seed=1))
    first: Any = lengths.for_stream(None, greedy=True)
    second: Any = lengths.for_stream(None, greedy=True)
    assert first._certainties is second._certainties


def test_a_confidence_that_was_named_says_alone_where_drafts_end() -> None:
    model, draft = build("llama"), build("llama", seed=1)
    for confidence, early in ((0.0, True), (0.4, False)):
        generator = SpeculativeGenerator(
            model, byte_tokenizer(), draft=draft, draft_confidence=confidence
        )
        found: Any = generator._setup.lengths._certainties
        assert (found[0] is not None) is early
