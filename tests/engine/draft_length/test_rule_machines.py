"""The rule on simulated machines: the costs that it learns, and its largest loss."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.replays.replay import Generator, Machine, Replayed, Text, replay_rule
from mlx_speculation.engine.draft_length.base import (
    Compared,
    Feedback,
    Plan,
    Reason,
)
from mlx_speculation.engine.draft_length.costs import (
    FORGETS,
    LEAST_PLAIN,
    RoundCosts,
    Source,
)
from mlx_speculation.engine.draft_length.rule import (
    FIRST_CREDIT,
    FIRST_LENGTH,
    LEAST_CREDIT,
    REVIEW_ROUNDS,
    REVIEW_STEPS,
    SHARE,
    SLOWEST,
    Credit,
)
from mlx_speculation.engine.draft_length.ruled import RuleDraftLength
from mlx_speculation.engine.lookup.survival import AcceptanceRates
from support.covering import covering

LONGEST = 16
STEADY = Feedback(0, 0, 1.0, behind=True, ahead=True)
CHEAP = {0: 1.0, **{n: 1.2 + 0.05 * n for n in (1, 2, 4, 8, 16)}}
DEAR = {0: 1.0, **{n: 1.0 + 1.0 * n for n in (1, 2, 4, 8, 16)}}


def text_of(right: float, tokens: int = 600, seed: int = 0) -> Text:
    """Return a text on which a drafted token is right with the probability `right`."""
    random = np.random.default_rng(seed)
    values = (random.geometric(1.0 - right, tokens) - 1).clip(0, LONGEST).tolist()
    return Text(50, (values,), ([LONGEST + 1] * tokens,))


def known_of(costs: RoundCosts | None = None, rate: float = 0.7) -> Source:
    return Source(costs or RoundCosts(), AcceptanceRates(first=rate))


def played(machine: Machine, text: Text, known: Source | None = None) -> Replayed:
    replayed, generator = Replayed(decisions=[]), Generator(["model"])
    generator.each = [known or known_of()]
    replay_rule(generator, machine, text, replayed)
    return replayed


def policy_of(credit: float, *, seconds: dict[int, float] = CHEAP) -> RuleDraftLength:
    """Return a policy after its first plain step; its source is often right."""
    known = known_of(RoundCosts({0: seconds}), 0.9)
    policy = RuleDraftLength([known], Credit(credit), LONGEST)
    plan = policy.plan(100, 500)
    assert (plan.length, plan.reason) == (0, "measure")
    policy.note(100, plan, STEADY)
    return policy


def noted(
    policy: RuleDraftLength,
    length: int,
    right: int,
    seconds: float,
    *,
    reason: Reason = "best",
    **more: float,
) -> None:
    plan = Plan(length, reason, Compared("model", 0, False, [], (), 0.0))
    policy.note(100, plan, Feedback(length, right, seconds, **more))  # type: ignore[arg-type]


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
@example(  # long drafts that are expected to pay, and do not
    verify=[1.8125, 0, 0, 0, 0, 1.0625, 0, 1, 0, 0, 0, 0, 0, 0, 0.3125, 0.125],
    first=1.0,
    right=0.65625,
    known=True,
    seed=37,
)
def test_no_machine_and_no_text_lose_more_than_the_credit(
    verify: list[float], first: float, right: float, known: bool, seed: int
) -> None:
    """Beyond the credit, at most one round is lost."""
    costs = [1.0, *(first + np.cumsum(verify))]
    known_costs = known_of(
        RoundCosts({0: dict(enumerate(costs))}) if known else None, 0.9
    )
    text = text_of(right, 300, seed)
    played_rounds = played(Machine([costs]), text, known_costs)
    assert played_rounds.tokens == len(text)
    lost = played_rounds.steps - played_rounds.tokens
    decisions = played_rounds.decisions or []
    dearest = max((costs[outcome.drafted] for _, outcome in decisions), default=1.0)
    assert lost <= FIRST_CREDIT + SHARE * len(text) + dearest


def test_a_busy_moment_does_not_end_drafts_for_long() -> None:
    """A round on a loaded machine can take as long as 99 plain steps."""
    policy = policy_of(2.0, seconds={0: 1.0})
    noted(policy, 2, 0, 99.0)
    assert policy.credit.steps[0] == LEAST_CREDIT
    for _ in range(round(-LEAST_CREDIT / SHARE) + 1):
        policy.note(100, Plan(0, "plain"), STEADY)
    assert policy.credit.steps[0] > 0
    known = policy_of(4.0)
    noted(known, 2, 0, 99.0)
    assert known.credit.steps[0] == pytest.approx(4.0 + SHARE + 1 - SLOWEST * CHEAP[2])


def test_a_busy_hour_does_not_end_drafts_for_good() -> None:
    """In the busy hour a draft has cost 13 plain steps; later it costs few."""
    for length in (FIRST_LENGTH, 8):
        known = known_of(RoundCosts({0: {0: 1.0, length: 13.0}}), 0.9)
        played_rounds = played(machine_of(CHEAP), text_of(0.9), known)
        drafts = [
            n
            for n, (plan, _) in enumerate(played_rounds.decisions or [])
            if plan.length
        ]
        assert drafts[0] <= 2 * FORGETS
        assert played_rounds.speed > 1.5


@pytest.mark.parametrize(
    ("costs", "wrong", "right"),
    covering([CHEAP, DEAR], [10.0, 0.1], [0.0, 0.5, 0.9], pairs=[(0, 1), (1, 2)]),
)
def test_kept_costs_that_are_wrong_are_corrected(
    costs: dict[int, float], wrong: float, right: float
) -> None:
    """Saved costs of drafts, or of all rounds, are ten times too high or too low."""
    machine, text = machine_of(costs), text_of(right, 1000)
    for plain in (1.0, wrong):
        kept = {n: wrong * seconds if n else plain for n, seconds in costs.items()}
        played_rounds = played(machine, text, known_of(RoundCosts(kept={0: kept})))
        knew_nothing = played(machine, text)
        assert played_rounds.speed > 0.97
        steps = tokens = 0.0
        for _, feedback in played_rounds.decisions or []:
            steps += feedback.seconds
            tokens += feedback.accepted + 1
            most = FIRST_CREDIT + SHARE * tokens + costs[FIRST_LENGTH]
            assert steps - tokens <= most
            assert tokens < 400 or tokens / steps > 0.97
        drafts = (
            n
            for n, (plan, _) in enumerate(played_rounds.decisions or [])
            if plan.length
        )
        assert next(drafts) <= FORGETS + LEAST_PLAIN + 1
        late = [
            sum(each.accepted + 1 for _, each in (one.decisions or [])[-100:])
            / sum(each.seconds for _, each in (one.decisions or [])[-100:])
            for one in (played_rounds, knew_nothing)
        ]
        assert late[0] > 0.9 * late[1]


def test_a_step_in_flight_is_no_part_of_a_round_behind_it() -> None:
    """A plain step took `cold` seconds; of the next one, `left` seconds remain."""
    for cold, left in ((2.0, 0.0), (1.2, 0.8), (1.0, 1.0), (3.0, 0.0), (None, 1.0)):
        policy = policy_of(0.0, seconds={0: 1.0})
        if cold is not None:
            first = Feedback(0, 0, cold, behind=False, ahead=True)
            policy.note(100, Plan(0, "plain"), first)
        noted(policy, 2, 2, 1.3 + left, behind=True)
        assert policy.sources[0].costs.table()[0][2] == pytest.approx(1.3)
        assert policy.credit.steps[0] == pytest.approx(SHARE + 3 - 1.3)


def test_a_prompt_that_is_to_be_read_counts_for_a_trial_alone() -> None:
    for rate, context, reason in (
        (0.05, 1000, "plain"),
        (0.05, 10, "trial"),
        (0.9, 1000, "best"),
    ):
        known = known_of(RoundCosts({0: CHEAP}), rate)
        known.costs.reading = 0.02
        policy = RuleDraftLength([known], Credit(), LONGEST)
        policy.note(context, policy.plan(context, 500), STEADY)
        assert policy.plan(context, 500).reason == reason


def test_a_prompt_that_is_read_for_a_trial_is_paid_for() -> None:
    paid_for: list[tuple[Reason, bool]] = [("trial", True), ("best", False)]
    for reason, paid in paid_for:
        policy = policy_of(12.0)
        before = policy.credit.steps[0]
        noted(policy, 1, 1, CHEAP[1], reason=reason, reading=5.0)
        assert policy.credit.steps[0] == pytest.approx(
            before + 2 - CHEAP[1] - 5.0 * paid
        )


def test_plain_steps_are_measured_again_while_drafts_are_the_best() -> None:
    policy = policy_of(4.0)
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


def test_the_budget_ends_every_draft() -> None:
    policy = policy_of(4.0)
    assert policy.plan(100, 0).reason == "budget"
    assert policy.plan(100, 3).length == 3
    assert policy.plan(100, 500).length == LONGEST
