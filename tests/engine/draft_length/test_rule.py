"""The rule takes the source and length that gain most, by expected tokens and time."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.draft_length.costs import RoundCosts, Source, few_lengths
from mlx_speculation.engine.draft_length.rule import SHARE, Credit, DraftRule

CONTEXT = 100


def source(cost: float, *, free: bool = True, longest: int = 16) -> Source:
    """Return a source; rounds cost 1 plain step and `cost` for each drafted token."""
    known = {n: 1.0 + cost * n for n in (0, longest)}
    return Source(RoundCosts({0: known}), free=free)


def rule_of(*sources: Source, credit: float = 24.0) -> DraftRule:
    rule = DraftRule(sources, Credit(credit), 16)
    assert rule.choose(CONTEXT, 16, ()).reason == "measure"
    return rule


def chosen(rule: DraftRule, *survival: Sequence[float], behind: bool = False) -> Plan:
    return rule.choose(CONTEXT, 16, [[row] for row in survival], behind=behind)


def source_of(rule: DraftRule, offered: Sequence[Sequence[Sequence[float]]]) -> Source:
    plan = rule.choose(CONTEXT, 16, offered)
    assert plan.source is not None
    return rule.sources[plan.source.index]


@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12),
    st.sampled_from([1 / 32, 1 / 8, 1 / 2]),
    st.floats(1.0, 3.0),
)
def test_a_proposal_is_cut_where_its_survival_pays_for_no_more_rows(
    rates: list[float], cost: float, rate: float
) -> None:
    survival = sorted(rates, reverse=True)
    rule = rule_of(source(cost))
    rule.credit.tokens, rule.credit.spent = 100.0 * rate, 100.0
    plan = chosen(rule, survival)

    def worth(length: int) -> float:
        return 1 + sum(survival[:length]) - rate * (1 + cost * length)

    lengths = {n for n in (*few_lengths(len(survival)), len(survival)) if n}
    paying = [n for n in lengths if n + 1 >= 1.2 * (1 + cost * n)]
    best = max(paying, key=worth, default=0)
    if not best or worth(best) <= worth(0):
        assert plan.length == 0
    else:
        assert worth(plan.length) == pytest.approx(worth(best))


def test_requests_share_the_width_that_pays_for_all_of_them() -> None:
    rule = rule_of(source(0.5))
    assert chosen(rule, [0.95] * 4).length == 4
    assert chosen(rule, [0.95] * 4, [], [], []).length == 0
    assert chosen(rule, [0.95] * 4, [0.9] * 2, [0.9] * 2).length == 2


def test_behind_a_step_the_first_token_stands_for_that_of_the_step() -> None:
    rule = rule_of(source(1 / 8))
    assert chosen(rule, [0.9], behind=True).length == 0
    assert chosen(rule, [0.9] * 5, behind=True).length == 4


def test_the_cheaper_of_two_sources_drafts_where_both_expect_as_much() -> None:
    free, model = source(1 / 8), source(0.3, free=False)
    rule = rule_of(free, model)
    alike = [[[0.8] * 4, [0.8] * 4]]
    assert source_of(rule, alike) is free
    unlike = [[[0.2], [0.9, 0.85, 0.8, 0.7]]]
    assert source_of(rule, unlike) is model


def test_a_free_source_costs_at_most_what_a_costly_one_was_measured_at() -> None:
    free, model = Source(RoundCosts({0: {0: 1.0}}), free=True), source(0.01, free=False)
    rule = rule_of(free, model)
    assert rule.choose(CONTEXT, 16, [[[0.9] * 16, [0.1]]]).length == 16


def test_no_draft_is_longer_than_the_credit_could_pay_for() -> None:
    rule = rule_of(source(1 / 2), credit=1.0)
    assert chosen(rule, [1.0] * 16).length == 2
    rule.credit.steps[0] = 0.0
    assert chosen(rule, [1.0] * 16).length == 0


def test_an_unknown_length_is_tried_short_and_doubled() -> None:
    unmeasured = Source(RoundCosts({0: {0: 1.0}}), free=True)
    rule = rule_of(unmeasured)
    lengths = []
    for _ in range(4):
        plan = chosen(rule, [0.99] * 16)
        lengths.append(plan.length)
        rule.learn(CONTEXT, plan, Feedback(plan.length, plan.length, 1.1))
    assert lengths == [2, 4, 8, 16]


def test_drafts_that_are_always_wrong_lose_the_credit_and_its_share() -> None:
    rule = rule_of(source(1 / 2), credit=4.0)
    steps = 0.0
    for _ in range(1000):
        plan = chosen(rule, [1.0] * 16)
        seconds = 1 + plan.length / 2
        steps += seconds
        plain = not plan.length
        rule.learn(CONTEXT, plan, Feedback(plan.length, 0, seconds, plain, plain))
    assert steps - 1000 <= 4 + 1000 * SHARE + 1  # 1 for the last draft


def test_a_free_source_may_know_no_costs_beside_one_that_was_calibrated() -> None:
    """A lookup without known costs is taken to cost what the other source does."""
    model, lookup = Source(RoundCosts({0: {0: 1.0, 4: 1.4}})), Source(free=True)
    rule = DraftRule([model, lookup], Credit(), 16)
    offered = [[[0.1] * 8, [0.9] * 8]]
    assert rule.choose(10, 8, offered).reason == "measure"
    assert source_of(rule, offered) is lookup


def test_a_source_that_has_lost_its_credit_keeps_no_other_from_drafting() -> None:
    lookup, model = source(1 / 4), source(1 / 4, free=False)
    rule = rule_of(lookup, model, credit=4.0)
    wrong = [[[], [0.9] * 4]]
    while (plan := rule.choose(CONTEXT, 16, wrong)).length:
        rule.learn(CONTEXT, plan, Feedback(plan.length, 0, 1 + plan.length / 4))
    right = [[[0.9] * 8, [0.9] * 4]]
    assert source_of(rule, right) is lookup
