"""Every drafter of a cascade has lengths of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation import CascadeDraft, LookupDraft, SpeculativeGenerator
from mlx_speculation.engine.draft_length import calibration
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.adaptive import AdaptiveDraftLength, Credit
from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.draft_length.cascade import CascadeDraftLength
from mlx_speculation.engine.draft_length.costs import RoundCosts
from mlx_speculation.engine.drafters.base import Choose, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.cascade import CascadeDrafter, Turns
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import DrafterFaultWarning
from mlx_speculation.samplers import Choice, Rows
from support.drafters.scripted_draft_lengths import Planned
from support.drafters.scripted_drafter import ScriptedDrafter
from support.identity import SAMPLED
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
LONGEST = 16
CHEAP = [1.0, *(1.5 + 0.05 * n for n in range(1, LONGEST + 1))]
DEAR = [1.0, *(1.5 + 0.5 * n for n in range(1, LONGEST + 1))]


class Asked(OpenDrafter):
    """Notes how many tokens it was asked for, and proposes so many, or nothing."""

    def __init__(self, *, speaks: bool = True) -> None:
        self.speaks = speaks
        self.limits: list[int] = []
        self.discarded = 0

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose zeros."""
        self.limits.append(limit)
        return Proposal(mx.zeros((limit if self.speaks else 0,), mx.uint32))

    def discard(self) -> None:
        """Count the calls."""
        self.discarded += 1


class Noting(Planned):
    """Planned lengths that also hear of what others have drafted."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.passed: list[int] = []

    def passed_over(self, tokens: int) -> None:
        self.passed.append(tokens)


def cascade_of(*drafters: Any, lengths: tuple[int, ...]) -> CascadeDrafter:
    cascade = CascadeDrafter(*drafters)
    cascade.turns = Turns(lengths=lengths)
    cascade.begin(Sequence([0]))
    return cascade


def proposed(cascade: CascadeDrafter, limit: int) -> int:
    return cascade.propose(Sequence([0]), limit, _no_choice).length


def _no_choice(logits: mx.array, rows: Rows, ids: mx.array | None = None) -> Choice:
    raise AssertionError("nobody chooses here")


def test_each_drafter_is_asked_for_what_was_planned_of_it() -> None:
    lookup, model = Asked(), Asked()
    cascade = cascade_of(lookup, model, lengths=(9, 4))
    assert proposed(cascade, 9) == 9
    assert cascade.turns.answered == 0
    lookup.speaks = False
    assert proposed(cascade, 9) == 4
    assert cascade.turns.answered == 1
    assert proposed(cascade, 10) == 5  # behind a step, whose token is one of them
    assert proposed(cascade, 3) == 3  # the budget
    assert (lookup.limits, model.limits) == ([9, 9, 10, 3], [4, 5, 3])
    model.speaks = False
    assert proposed(cascade, 9) == 0
    assert cascade.turns.answered is None


def test_a_drafter_that_may_draft_nothing_is_not_asked() -> None:
    lookup, model = Asked(), Asked()
    assert proposed(cascade_of(lookup, model, lengths=(0, 4)), 5) == 5
    assert (lookup.limits, model.limits) == ([], [5])
    assert proposed(cascade_of(lookup, Asked(), lengths=(0, 0)), 1) == 0


def test_who_was_not_asked_undoes_nothing() -> None:
    """Its last round stays, which was committed."""
    lookup, model = Asked(), Asked()
    cascade = cascade_of(lookup, model, lengths=(0, 4))
    assert proposed(cascade, 4) == 4
    cascade.settle(4)
    cascade.turns.lengths = (0, 0)
    assert proposed(cascade, 1) == 0
    cascade.discard()
    assert lookup.discarded == model.discarded == 0


def test_without_lengths_all_are_asked_for_as_many() -> None:
    lookup, model = Asked(speaks=False), Asked()
    cascade = CascadeDrafter(lookup, model)
    assert proposed(cascade, 7) == 7
    assert lookup.limits == model.limits == [7]


def planned(*lengths: int) -> tuple[CascadeDraftLength, list[Any]]:
    policies: list[Any] = [Noting([length]) for length in lengths]
    return CascadeDraftLength(policies), policies


def test_a_plan_is_the_longest_and_has_them_all() -> None:
    lengths, _ = planned(3, 8, 0)
    plan = lengths.plan(100, 50)
    assert plan.length == 8
    assert [each.length for each in plan.each] == [3, 8, 0]
    assert lengths.turns.lengths == (3, 8, 0)
    assert str(plan).endswith("of each drafter: 3 (fixed) or 8 (fixed) or 0 (fixed)")
    assert lengths.longest == 8


def test_a_step_that_one_policy_wants_to_see_is_a_step_for_all() -> None:
    lengths, (_, second) = planned(4, 0)
    second.plan = lambda context, limit: Plan(0, "measure")
    plan = lengths.plan(100, 50)
    assert (plan.length, plan.reason) == (0, "measure")
    assert lengths.turns.lengths == (0, 0)
    assert plan.each[0].length == 4


def test_a_round_is_noted_for_its_drafter_and_a_step_for_all() -> None:
    lengths, (lookup, first, paused, last) = planned(9, 4, 0, 2)
    plan = lengths.plan(100, 50)
    lengths.turns.answered = 1
    drafted = Feedback(4, 3, 0.1)
    lengths.note(100, plan, drafted)
    assert first.noted == [(plan.each[1], drafted)]
    assert lookup.noted == paused.noted == last.noted == []
    # The lookup was asked and knows the text; the others were not.
    assert (lookup.passed, paused.passed, last.passed) == ([], [4], [4])
    step = Feedback(0, 0, 0.1, behind=True, ahead=True)
    lengths.note(101, plan, step)
    for policy, own in zip((lookup, first, paused, last), plan.each, strict=True):
        assert policy.noted[-1] == (own, step)
    lengths.turns.answered = 3
    lengths.note(102, plan, drafted)
    assert last.noted[-1] == (plan.each[3], drafted)
    assert (lookup.passed, first.passed, paused.passed) == ([], [], [4, 4])
    lengths.end()
    assert lookup.ended == last.ended == 1


def policy_of(seconds: list[float]) -> AdaptiveDraftLength:
    costs = RoundCosts({0: dict(enumerate(seconds))})
    return AdaptiveDraftLength(costs, AcceptanceRates(), Credit(), LONGEST)


def test_a_wrong_model_is_paused_behind_a_lookup_that_is_right() -> None:
    """One policy for both asked the model for 16 tokens each time, or neither."""
    random = np.random.default_rng(3)
    lookup, model = policy_of(CHEAP), policy_of(DEAR)
    lengths = CascadeDraftLength([lookup, model])
    asked: list[tuple[int, ...]] = []
    context = 100
    for number in range(300):
        plan = lengths.plan(context, 1000)
        finds = random.random() < 0.5 and plan.each[0].length > 0
        length = plan.each[0 if finds else 1].length
        accepted = length if finds else 0
        lengths.turns.answered = 0 if finds else 1
        seconds = (CHEAP if finds else DEAR)[length]
        steady = length == 0
        outcome = Feedback(length, accepted, seconds, behind=steady, ahead=steady)
        lengths.note(context, plan, outcome)
        context += accepted + 1
        if number >= 150 and lengths.turns.lengths is not None:
            asked.append(lengths.turns.lengths)
    assert np.median([each[0] for each in asked]) == LONGEST
    assert np.mean([each[1] == 0 for each in asked]) > 0.9


def test_a_lookup_whose_costs_nobody_knows_is_asked_before_long() -> None:
    """It waited for plain steps, which there were none of while the model drafted."""
    costs, dear = RoundCosts(), RoundCosts({0: dict(enumerate(DEAR))})
    credit = Credit()
    lookup = AdaptiveDraftLength(costs, AcceptanceRates(), credit, LONGEST)
    rates = AcceptanceRates([0.95] * 16, 30.0)
    model = AdaptiveDraftLength(dear, rates, credit, LONGEST)
    lengths = CascadeDraftLength([lookup, model])
    behind, drafted = False, []
    plan = lengths.plan(100, 1000)
    for _ in range(120):
        assert lengths.turns.lengths is not None
        answers = 0 if lengths.turns.lengths[0] else 1
        length = lengths.turns.lengths[answers]
        following = None if length else lengths.plan(100, 1000)
        ahead = following is not None and following.length == 0
        lengths.turns.answered = answers
        seconds = (CHEAP if answers == 0 else DEAR)[length]
        seconds *= 1 if length else (0.1 if behind else 1) + 0.9 * ahead
        outcome = Feedback(length, length, seconds, behind, ahead)
        lengths.note(100, plan, outcome)
        drafted += [answers] if length else []
        plan, behind = following or lengths.plan(100, 1000), ahead
    assert drafted[-40:].count(0) == 40
    assert lookup.costs.curve(100, LONGEST)[-1] < 0.6 * DEAR[LONGEST]


@pytest.mark.usefixtures("measured")
def test_costs_are_kept_for_each_drafter_and_the_text_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "PASSES", 1)
    model, small = build("llama"), build("llama", seed=1)
    plain = SpeculativeGenerator(model, byte_tokenizer())
    options: dict[str, Any] = {"max_tokens": 80, "sampling": SAMPLED}
    expected = plain.generate(PROMPT, **options).tokens
    cascade = CascadeDraft(LookupDraft(), small)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=cascade)
    table = generator.calibrate(contexts=[8])
    stream = generator.stream(PROMPT, explain=True, **options)
    assert [chunk.token for chunk in stream] == expected
    assert all(len(plan.each) == 2 for plan, _ in stream.decisions)
    for draft in (small, "lookup"):
        other = SpeculativeGenerator(model, byte_tokenizer(), draft=draft)
        known = other.lengths.known[0].costs.table()
        assert 0 in known[0]
        if draft is small:  # it was calibrated, and a lookup learns in its rounds
            assert set(table[0]) == set(known[0])
    limited = generator.stream(PROMPT, explain=True, max_draft=2, **options)
    assert [chunk.token for chunk in limited] == expected
    assert max(plan.length for plan, _ in limited.decisions) <= 2


def test_a_drafter_of_a_cascade_that_fails_is_passed_over() -> None:
    model = build("llama")
    plain = SpeculativeGenerator(model, byte_tokenizer())
    expected = plain.generate(PROMPT, max_tokens=60).tokens

    class Failing(Asked):
        def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
            raise RuntimeError("broken")

    right = ScriptedDrafter(PROMPT + expected, right=1.0)
    generator = SpeculativeGenerator(
        model, byte_tokenizer(), draft=CascadeDraft(Failing(), right), draft_length=None
    )
    lengths = CascadeDraftLength([policy_of(CHEAP), policy_of(CHEAP)])
    stream = generator.stream(PROMPT, max_tokens=60, draft_length=lengths)
    with pytest.warns(DrafterFaultWarning, match="broken"):
        assert [chunk.token for chunk in stream] == expected
    assert [fault.drafter for fault in stream.stats.drafter_faults] == ["Failing"]
    assert stream.stats.accepted > 20


def test_plans_of_single_drafters_have_no_others() -> None:
    plan = Planned([4]).plan(0, 9)
    assert plan.each == ()
    assert "of each drafter" not in str(replace(plan, length=3))
