"""The adaptive policy on simulated machines: what it learns, and what it may lose.

How it fares on real texts is in `test_trace_replay`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.replays.replay import Machine, Replayed, Text, replay
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.adaptive import (
    FIRST_CREDIT,
    FIRST_LENGTH,
    LEAST_CREDIT,
    LONGER_ROUNDS,
    MOST_CREDIT,
    PAUSE,
    REVIEW_ROUNDS,
    REVIEW_STEPS,
    SHARE,
    SLOWEST,
    AdaptiveDraftLength,
    Credit,
    few_lengths,
)
from mlx_speculation.engine.draft_length.base import Feedback, FixedDraftLength, Plan
from mlx_speculation.engine.draft_length.costs import RoundCosts

LONGEST = 16
STEADY = Feedback(0, 0, 1.0, behind=True, ahead=True)
CHEAP = {0: 1.0, **{n: 1.2 + 0.05 * n for n in (1, 2, 4, 8, 16)}}
DEAR = {0: 1.0, **{n: 1.0 + 1.0 * n for n in (1, 2, 4, 8, 16)}}


def text_of(right: float, tokens: int = 600, seed: int = 0) -> Text:
    """Return a text of which each drafted token is right with this probability."""
    random = np.random.default_rng(seed)
    found = (random.geometric(1.0 - right, tokens) - 1).clip(0, LONGEST).tolist()
    return Text(50, (found,), ([LONGEST + 1] * tokens,))


def policy_of(
    costs: RoundCosts | None = None,
    rates: Sequence[float] = (),
    credit: float = FIRST_CREDIT,
    weight: float = 40.0,
) -> AdaptiveDraftLength:
    known = AcceptanceRates(rates, weight)
    return AdaptiveDraftLength(costs or RoundCosts(), known, Credit(credit), LONGEST)


def begun(policy: AdaptiveDraftLength, context: int = 100) -> AdaptiveDraftLength:
    """Return a policy after its first plain step."""
    plan = policy.plan(context, 500)
    assert (plan.length, plan.reason) == (0, "measure")
    policy.note(context, plan, replace(STEADY, ahead=False))
    return policy


def played(policy: AdaptiveDraftLength, machine: Machine, text: Text) -> Replayed:
    found = Replayed(decisions=[])
    replay(policy, machine, text, found)
    return found


def machine_of(costs: dict[int, float], **options: float) -> Machine:
    lengths = sorted(costs)
    verify = np.interp(range(LONGEST + 1), lengths, [costs[n] for n in lengths])
    return Machine([verify.tolist()], **options)  # type: ignore[arg-type]


@given(
    verify=st.lists(st.floats(0.0, 2.0), min_size=LONGEST, max_size=LONGEST),
    first=st.floats(1.0, 3.0),
    right=st.floats(0.0, 0.95),
    known=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
@example(  # long drafts that are expected to pay, and lose more than there is credit
    verify=[1.8125, 0, 0, 0, 0, 1.0625, 0, 1, 0, 0, 0, 0, 0, 0, 0.3125, 0.125],
    first=1.0,
    right=0.65625,
    known=True,
    seed=37,
)
def test_no_machine_and_no_text_lose_more_than_the_credit(
    verify: list[float], first: float, right: float, known: bool, seed: int
) -> None:
    """Nor more than one round beyond it, of a length whose cost was not known."""
    costs = [1.0, *(first + np.cumsum(verify))]
    policy = policy_of(
        RoundCosts({0: dict(enumerate(costs))}) if known else None, [0.9] * 16
    )
    text = text_of(right, 300, seed)
    found = played(policy, Machine([costs]), text)
    assert found.tokens == len(text)
    lost = found.steps - found.tokens
    decisions = found.decisions or []
    dearest = max((costs[outcome.drafted] for _, outcome in decisions), default=1.0)
    assert lost <= FIRST_CREDIT + SHARE * len(text) + dearest


@pytest.mark.parametrize("costs", [CHEAP, {0: 1.0, 1: 1.8, 4: 1.9, 16: 2.0}, DEAR])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("left", [0.0, 0.9])
def test_it_is_nearly_as_fast_as_the_best_fixed_length(
    costs: dict[int, float], right: float, left: float
) -> None:
    machine = machine_of(costs, left=left, cold=1.0 + 0.1 * left)
    text = text_of(right, 1500)
    speeds = []
    for length in (0, 1, 2, 4, 8, 16):
        fixed = Replayed()
        replay(FixedDraftLength(length), machine, text, fixed)
        speeds.append(fixed.speed)
    assert played(policy_of(), machine, text).speed > 0.9 * max(speeds)


def test_drafts_begin_short_and_grow() -> None:
    found = played(policy_of(), machine_of(CHEAP), text_of(0.99))
    lengths = [plan.length for plan, _ in found.decisions or [] if plan.length]
    assert lengths[0] == FIRST_LENGTH
    longest = FIRST_LENGTH
    for length in lengths:
        assert length <= 2 * longest or length == FIRST_LENGTH
        longest = max(longest, length)
    assert longest == LONGEST
    assert lengths[:6].count(FIRST_LENGTH) <= 2


def test_a_wrong_draft_is_given_up_after_few_rounds_and_tried_again_seldom() -> None:
    machine = machine_of(CHEAP)
    found = played(policy_of(), machine, text_of(0.0))
    drafts = [n for n, (plan, _) in enumerate(found.decisions or []) if plan.length]
    assert 0 < sum(n < 100 for n in drafts) <= 14
    assert 1 <= sum(n >= 300 for n in drafts) <= 300 * SHARE / 0.2 + 1
    assert found.speed > 0.97


def test_a_pause_grows_with_trials_in_vain_and_ends_with_one_that_is_right() -> None:
    policy = begun(policy_of(RoundCosts({0: CHEAP}), [0.1] * 16, credit=24.0))
    pauses: list[int] = []
    pause = 0
    while len(pauses) < 6:
        plan = policy.plan(100, 500)
        if plan.length == 0:
            pause += 1
            policy.note(100, plan, STEADY)
            continue
        assert plan.reason == "trial"
        pauses.append(pause)
        pause = 0
        right = plan.length if len(pauses) == 5 else 0
        policy.note(100, plan, Feedback(plan.length, right, CHEAP[1]))
        if right:
            plan = policy.plan(100, 500)
            assert plan.reason == "trial"
            policy.note(100, plan, Feedback(plan.length, 0, CHEAP[1]))
    assert pauses[:4] == [0, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE]
    assert pauses[4] == 8 * PAUSE
    assert pauses[5] == 2 * PAUSE


def test_without_credit_there_is_no_draft() -> None:
    for rates, reason in (([0.9] * 16, "best"), ([0.05] * 16, "trial")):
        poor = begun(policy_of(RoundCosts({0: CHEAP}), rates, credit=0.0))
        assert poor.plan(100, 500).reason == "plain"
        rich = begun(policy_of(RoundCosts({0: CHEAP}), rates, credit=1.0))
        assert rich.plan(100, 500).reason == reason


def test_plain_steps_fill_the_credit_and_drafts_move_it_by_what_they_gain() -> None:
    policy = begun(policy_of(RoundCosts({0: CHEAP}), [0.9] * 16, credit=1.0))
    for _ in range(10):
        policy.note(100, Plan(0, "plain"), STEADY)
    assert policy.credit.steps == pytest.approx(1.0 + 10 * SHARE)
    policy.credit.steps = 1.0
    policy.note(100, Plan(2, "best"), Feedback(2, 1, CHEAP[2]))
    assert policy.credit.steps == pytest.approx(3.0 - CHEAP[2])
    policy.note(100, Plan(2, "best"), Feedback(2, 0, 99.0))  # the machine was busy
    assert policy.credit.steps == pytest.approx(4.0 - CHEAP[2] - SLOWEST * CHEAP[2])
    for _ in range(40):
        policy.note(100, Plan(16, "best"), Feedback(16, 16, CHEAP[16]))
    assert policy.credit.steps == MOST_CREDIT


def test_a_busy_moment_does_not_end_drafts_for_long() -> None:
    """A round on a loaded machine took 13 steps, and there was no draft for 700."""
    policy = begun(policy_of(RoundCosts({0: {0: 1.0}})))
    policy.note(100, Plan(2, "best"), Feedback(2, 0, 99.0))
    assert policy.credit.steps == LEAST_CREDIT
    for _ in range(round(-LEAST_CREDIT / SHARE) + 1):
        policy.note(100, Plan(0, "plain"), STEADY)
    assert policy.credit.steps > 0


def test_a_step_in_flight_is_no_part_of_a_round_behind_it() -> None:
    """By what a plain step takes that submits the next one and was not in flight."""
    for cold, left in ((2.0, 0.0), (1.2, 0.8), (1.0, 1.0), (3.0, 0.0), (None, 1.0)):
        policy = policy_of(RoundCosts({0: {0: 1.0}}), [0.9] * 16, credit=0.0)
        if cold is not None:
            first = Feedback(0, 0, cold, behind=False, ahead=True)
            policy.note(100, Plan(0, "plain"), first)
        seconds = 1.3 + left
        policy.note(100, Plan(2, "best"), Feedback(2, 2, seconds, behind=True))
        assert policy.costs.table()[0][2] == pytest.approx(1.3)
        assert policy.credit.steps == pytest.approx(3 - 1.3)


def test_what_a_draft_has_missed_is_charged_to_no_length() -> None:
    policy = begun(policy_of(RoundCosts({0: CHEAP}), [0.9] * 16))
    before = policy.costs.table()
    for _ in range(9):
        for _ in range(3):
            policy.note(100, Plan(0, "plain"), STEADY)
        policy.note(100, Plan(2, "best"), Feedback(2, 2, 5.0))
    assert policy.costs.table() == before
    for _ in range(9):
        policy.note(100, Plan(2, "best"), Feedback(2, 2, 5.0))
    assert policy.costs.table()[0][2] == 5.0


def test_a_prompt_that_is_to_be_read_counts_for_a_trial_alone() -> None:
    costs = RoundCosts({0: CHEAP})
    costs.reading = 0.02
    doubtful = begun(policy_of(costs, [0.05] * 16), 1000)
    assert doubtful.plan(1000, 500).reason == "plain"
    assert begun(policy_of(costs, [0.05] * 16), 10).plan(10, 500).reason == "trial"
    assert begun(policy_of(costs, [0.9] * 16), 1000).plan(1000, 500).reason == "best"


def test_a_prompt_that_was_read_in_vain_is_paid_for_at_the_end() -> None:
    for right, paid in ((0, True), (16, False)):
        policy = begun(policy_of(RoundCosts({0: CHEAP}), [0.9] * 16, credit=12.0))
        for reading in (5.0, 0.0, 0.0):
            outcome = Feedback(16, right, CHEAP[16], reading=reading)
            policy.note(100, Plan(16, "best"), outcome)
        before = policy.credit.steps
        policy.end()
        assert policy.credit.steps == before - 5.0 * paid


def test_plain_steps_are_measured_again_while_drafts_are_the_best() -> None:
    policy = begun(policy_of(RoundCosts({0: CHEAP}), [0.9] * 16))
    measured = []
    for number in range(REVIEW_ROUNDS + REVIEW_STEPS + 1):
        plan = policy.plan(100, 500)
        seconds = CHEAP[16] if plan.length else 1.0
        plain = plan.length == 0
        outcome = Feedback(plan.length, plan.length, seconds, plain, plain)
        policy.note(100, plan, outcome)
        if plan.reason == "measure":
            measured.append(number)
    assert measured == list(range(REVIEW_ROUNDS, REVIEW_ROUNDS + REVIEW_STEPS))


def test_now_and_then_a_draft_is_longer_than_is_best() -> None:
    """Else nothing would tell that later tokens are right, or rounds are cheap."""
    policy = begun(policy_of(RoundCosts({0: CHEAP}), [0.8, 0.0], weight=400.0))
    lengths = []
    for _ in range(LONGER_ROUNDS):
        plan = policy.plan(100, 500)
        lengths.append(plan.length)
        policy.note(100, plan, Feedback(plan.length, 1, CHEAP[plan.length]))
    assert lengths == [1] * (LONGER_ROUNDS - 1) + [2]


def test_a_step_of_a_run_is_decided_with_the_others_unless_rows_change() -> None:
    policy = begun(policy_of(RoundCosts({0: DEAR}), [0.0] * 16))
    plans = [policy.plan(100, 500) for _ in range(PAUSE)]
    assert all(plan is plans[0] for plan in plans)
    assert policy.plan(100, 500) is not plans[0]
    policy.rates = AcceptanceRates([1.0] * 16, 40.0)
    policy.costs = RoundCosts({0: CHEAP})
    assert policy.plan(100, 500).length == 0
    policy.decide_anew()
    assert policy.plan(100, 500).length > 0


def test_the_budget_ends_a_pause_and_every_draft() -> None:
    policy = begun(policy_of(RoundCosts({0: CHEAP}), [0.9] * 16))
    assert policy.plan(100, 0).reason == "budget"
    assert policy.plan(100, 3).length == 3
    assert policy.plan(100, 500).length == LONGEST


def test_fixed_lengths_give_way_to_the_budget_alone() -> None:
    lengths = FixedDraftLength(4)
    assert [lengths.plan(9, limit).length for limit in (9, 4, 2, 0, -1)] == [
        *(4, 4, 2, 0, 0)
    ]


def test_few_lengths_are_those_of_shapes_that_are_met_anyway() -> None:
    assert few_lengths(16) == (0, 1, 2, 3, 4, 6, 8, 12, 16)
    assert few_lengths(5) == (0, 1, 2, 3, 4)


def test_expected_tokens_of_a_chain() -> None:
    rates = AcceptanceRates([0.5, 0.5], weight=1e6)
    assert rates.expected(2) == pytest.approx([1.0, 1.5, 1.75], abs=1e-4)


def test_rates_count_positions_up_to_the_first_rejection() -> None:
    rates = AcceptanceRates()
    for _ in range(400):
        rates.note(drafted=4, accepted=2)
    first, second, third, fourth = rates.rates(4)
    assert second > first > 0.94
    assert third < 0.2
    assert fourth == third  # never asked: as the one before it
    assert rates.known == 3


def test_loosened_rates_are_the_same_and_move_sooner() -> None:
    rates = AcceptanceRates([0.9] * 3, 40.0)
    loose = rates.loosened()
    for both in (rates, loose):
        both.note(1, 0)
    assert loose.rates(1)[0] < rates.rates(1)[0] - 0.05
    assert rates.rates(1)[0] > 0.8


def test_a_cost_is_a_median_of_the_last_rounds() -> None:
    costs = RoundCosts({0: {0: 1.0}})
    for seconds in (1.0, 9.0, 1.1, 1.2):
        costs.note(10, 0, seconds)
    assert costs.plain(10) == pytest.approx(1.0)
    for _ in range(9):
        costs.note(10, 0, 2.0)
    assert costs.plain(10) == 2.0


def test_one_plain_step_is_not_believed() -> None:
    costs = RoundCosts()
    assert costs.plain(10) is None
    costs.note(10, 0, 5.0)
    assert costs.plain(10) is None
    costs.note(10, 0, 1.0)
    assert costs.plain(10) == 3.0


def test_costs_of_an_unknown_context_are_those_of_the_nearest() -> None:
    costs = RoundCosts({0: {0: 1.0, 2: 2.0}, 3: {0: 3.0}})
    assert costs.curve(100_000, 0) == [3.0]
    assert costs.curve(600, 2) == pytest.approx([1.0, 1.5, 2.0])
    for _ in range(9):
        costs.note(600, 2, 9.0)
    assert costs.curve(100, 2)[2] == 2.0


@given(st.dictionaries(st.integers(1, 16), st.floats(0.1, 9.0), max_size=6))
def test_a_curve_has_every_known_cost_and_straight_lines_between(
    drafts: dict[int, float],
) -> None:
    known = {0: 1.0, **drafts}
    curve = RoundCosts({0: known}).curve(10, 16)
    lengths = sorted(known)
    between = np.interp(range(lengths[-1] + 1), lengths, [known[n] for n in lengths])
    assert curve[: lengths[-1] + 1] == pytest.approx(between.tolist())
    steps = np.diff(curve[lengths[-1] :])
    assert len(curve) == 17
    assert all(steps >= -1e-9)
    assert np.ptp(steps) < 1e-9 if len(steps) else True


def test_a_cost_beyond_the_longest_known_errs_to_the_cheap_side() -> None:
    """A length that looks too dear would never be tried."""
    assert RoundCosts({0: {0: 1.0, 2: 2.0}}).curve(10, 4)[4] == pytest.approx(2.5)
    assert RoundCosts({0: {0: 1.0}}).curve(10, 4)[4] == pytest.approx(2.0)
