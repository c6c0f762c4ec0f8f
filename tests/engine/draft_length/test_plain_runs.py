"""Runs of plain steps: one decision for several, and nothing forgotten.

Faults that were made by hand, and found here: a run without an end; a step that is kept
and never learnt from, or twice; one that stood alone, or whose shape was new, kept too;
steps learnt as those of other costs; a run that goes on when the costs or the rows are
others; a run that ignores the budget; a step that the draft does not miss.
"""

from dataclasses import replace
from typing import Any

import pytest

from mlx_speculation.engine.draft_length import exploration
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.adaptive import AdaptiveLengths
from mlx_speculation.engine.draft_length.base import Outcome, Plan
from mlx_speculation.engine.draft_length.costs import RoundCosts
from mlx_speculation.engine.draft_length.exploration import Allowance

CONTEXT = 100
STEADY = Outcome(0, 0, 1.1, behind=True, ahead=True)
SLOW_DRAFTS = {0: 1.0, **{n: 1.0 + 0.5 * n for n in range(1, 9)}}


class Counted(AdaptiveLengths):
    """Counts its decisions."""

    decided = 0

    def _measurement(self, context: int, longest: int):  # type: ignore[no-untyped-def]
        self.decided += 1
        return super()._measurement(context, longest)


def paused_policy(costs: RoundCosts | None = None) -> Counted:
    """Return a policy that has seen a draft fail for long, after its first round."""
    rates = AcceptanceRates([0.0] * 8, 40.0)
    nothing_to_lose = Allowance(carried=-4.0, in_vain=20)
    policy = Counted(
        costs or RoundCosts({0: SLOW_DRAFTS}), rates, 8, allowance=nothing_to_lose
    )
    first = policy.plan(CONTEXT, 500)
    policy.note(CONTEXT, first, replace(STEADY, behind=False))
    return policy


def test_one_decision_holds_for_a_run_of_steps() -> None:
    policy = paused_policy()
    plans = []
    for _ in range(5 * exploration.PLAIN_STEPS):
        plans.append(policy.plan(CONTEXT, 500))
        policy.note(CONTEXT, plans[-1], STEADY)
    assert {(plan.length, plan.reason) for plan in plans} == {(0, "plain")}
    assert policy.decided == 5


def test_a_run_teaches_what_its_steps_would_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables, left = [], []
    for steps in (exploration.PLAIN_STEPS, 1):
        monkeypatch.setattr(exploration, "PLAIN_STEPS", steps)
        costs = RoundCosts({0: SLOW_DRAFTS})
        policy = paused_policy(costs)
        for number in range(43):
            plan = policy.plan(CONTEXT, 500)
            alone = number % 10 != 9
            seconds = 1.0 + number % 7 / 10
            outcome = replace(STEADY, seconds=seconds, ahead=alone, fresh=not alone)
            policy.note(CONTEXT + number, plan, outcome)
        policy.end()
        tables.append(costs.table())
        left.append(policy._allowance.carried)
    assert tables[0] == tables[1]
    assert left[0] == pytest.approx(left[1])


@pytest.mark.parametrize("odd", [{"ahead": False}, {"fresh": True}])
def test_a_step_that_tells_something_else_is_learnt_from_at_once(
    odd: dict[str, Any],
) -> None:
    costs = RoundCosts({0: SLOW_DRAFTS}, left=0.3)
    policy = paused_policy(costs)
    plan = policy.plan(CONTEXT, 500)
    before = costs.left, costs.table()
    policy.note(CONTEXT, plan, replace(STEADY, **odd))
    policy.end()
    assert costs.table() == before[1]
    assert (costs.left != before[0]) == ("ahead" in odd)


def test_plain_steps_for_another_reason_are_counted_as_what_they_are() -> None:
    run = exploration.PlainRun()
    assert run.keep(CONTEXT, Plan(0, "plain"), STEADY)
    assert not run.keep(CONTEXT, Plan(0, "review"), STEADY)
    assert run.taken() == [(CONTEXT, STEADY.seconds)]


def test_the_budget_ends_a_run() -> None:
    policy = paused_policy()
    assert policy.plan(CONTEXT, 500).reason == "plain"
    assert policy.plan(CONTEXT, 0).reason == "budget"
    assert policy.plan(CONTEXT, 500).reason == "plain"


def test_other_costs_end_a_run_and_learn_nothing_from_it() -> None:
    own, other = RoundCosts({0: SLOW_DRAFTS}), RoundCosts({0: SLOW_DRAFTS})
    policy = paused_policy(own)
    policy.note(CONTEXT, policy.plan(CONTEXT, 500), STEADY)
    before, decided = own.table(), policy.decided
    policy.use_costs(other)
    assert own.table() != before
    assert other.table() == before
    policy.plan(CONTEXT, 500)
    assert policy.decided == decided + 1


def test_other_rows_end_a_run() -> None:
    policy = paused_policy()
    policy.plan(CONTEXT, 500)
    policy.rates = AcceptanceRates([0.99] * 8, 40.0)
    assert policy.plan(CONTEXT, 500).length == 0
    policy.reconsider()
    assert policy.plan(CONTEXT, 500).length > 0


def test_a_draft_misses_every_step_of_a_run() -> None:
    policy = paused_policy()
    for count in range(1, 30):
        policy.note(CONTEXT, policy.plan(CONTEXT, 500), STEADY)
        assert policy._lag == 1 + count


def test_what_was_right_before_a_run_is_not_the_last_draft_after_it() -> None:
    policy = paused_policy()
    plan = policy.plan(CONTEXT, 500)
    policy._right = True
    for _ in range(3 * exploration.PLAIN_STEPS):
        assert plan.reason == "plain"
        policy.note(CONTEXT, plan, STEADY)
        plan = policy.plan(CONTEXT, 500)
