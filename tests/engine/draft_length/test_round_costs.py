"""Costs and acceptance of rounds: tables, medians, averages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.engine.draft_length.base import FixedDraftLength
from mlx_speculation.engine.draft_length.costs import RoundCosts, few_lengths
from mlx_speculation.engine.lookup.survival import AcceptanceRates


def test_fixed_lengths_give_way_to_the_budget_alone() -> None:
    lengths = FixedDraftLength(4)
    assert [lengths.plan(9, limit).length for limit in (9, 4, 2, 0, -1)] == [
        *(4, 4, 2, 0, 0)
    ]


def test_few_lengths_are_those_of_shapes_that_are_met_anyway() -> None:
    assert few_lengths(16) == (0, 1, 2, 3, 4, 6, 8, 12, 16)
    assert few_lengths(5) == (0, 1, 2, 3, 4)


def test_rates_count_positions_up_to_the_first_rejection() -> None:
    rates = AcceptanceRates()
    for _ in range(400):
        rates.note(range(4), 2)
    first, second, third, fourth = (rates.survival([n])[0] for n in range(4))
    assert second == first > 0.94
    assert third < 0.2
    assert fourth == 0.7  # never tried


def test_a_cost_is_a_median_of_the_last_rounds() -> None:
    costs = RoundCosts({0: {0: 1.0}})
    for seconds in (1.0, 9.0, 1.1, 1.2):
        costs.note(10, 0, seconds)
    assert costs.plain(10) == pytest.approx(1.05)
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
    assert costs.plain(100_000) == 3.0
    assert costs.curve(600, 2, 7.0) == pytest.approx([7.0, 10.5, 14.0])
    for _ in range(9):
        costs.note(600, 2, 9.0)
    assert costs.curve(100, 2, 1.0)[2] == 2.0


@given(st.dictionaries(st.integers(1, 16), st.floats(0.1, 9.0), max_size=6))
def test_a_curve_has_every_known_cost_and_straight_lines_between(
    drafts: dict[int, float],
) -> None:
    known = {0: 1.0, **drafts}
    curve = RoundCosts({0: known}).curve(10, 16, 5.0)
    lengths = sorted(known)
    between = np.interp(range(lengths[-1] + 1), lengths, [known[n] for n in lengths])
    assert curve[: lengths[-1] + 1] == pytest.approx(between.tolist())
    steps = np.diff(curve[lengths[-1] :])
    assert len(curve) == 17
    assert all(steps >= -1e-9)
    assert np.ptp(steps) < 1e-9 if len(steps) else True


def test_a_cost_beyond_the_longest_known_errs_to_the_cheap_side() -> None:
    """A length whose cost is overestimated would never be tried."""
    assert RoundCosts({0: {0: 1.0, 2: 2.0}}).curve(10, 4, 5.0)[4] == pytest.approx(2.5)
    assert RoundCosts({0: {0: 1.0}}).curve(10, 4, 5.0)[4] == pytest.approx(2.0)


def test_a_source_that_was_never_measured_begins_with_the_plain_step_of_another() -> (
    None
):
    assert RoundCosts().curve(10, 4, 1.0) == RoundCosts({0: {0: 1.0}}).curve(10, 4, 5.0)


def test_costs_are_read_while_another_thread_measures() -> None:
    """A round that is noted meanwhile breaks no loop over a table."""
    costs, contexts = RoundCosts(), iter(range(1, 1 << 40, 1 << 30))

    class Length(int):
        """A length that notes a round when it is compared, as another thread could."""

        def __bool__(self) -> bool:
            costs.note(next(contexts), 1, 1.0)
            return int(self) != 0

        def __gt__(self, other: int) -> bool:
            return bool(self) and int(self) > int(other)

    for length in (2, Length(3), 4):
        costs.note(9, length, 1.0)
    costs.note(9, 0, 1.0)
    costs.note(9, 0, 1.0)
    assert costs.longest() == 4
    assert costs.plain(9) == 1.0
