"""Outcomes of decided rows, for one request and for several in a batch."""

import mlx.core as mx

from mlx_speculation.engine.result import Origin
from mlx_speculation.engine.round.outcome import RoundOutcome, outcomes
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.samplers import Verified


def verified(
    tokens: list[int], accepted: list[int] | int, unusable: tuple[int, ...] = ()
) -> Verified:
    normals = [float("nan") if i in unusable else 1.0 for i in range(len(tokens))]
    return Verified(
        mx.array(tokens, mx.uint32), mx.array(accepted, mx.int32), mx.array(normals)
    )


def good(outcome: RoundOutcome | Exception) -> RoundOutcome:
    assert isinstance(outcome, RoundOutcome)
    return outcome


def outcome_of(one: Verified) -> RoundOutcome:
    (outcome,) = outcomes(one, [len(one.tokens) - 1])
    return good(outcome)


def test_rows_of_shorter_drafts_beside_longer_ones_end_as_alone() -> None:
    """A padded row can get a bonus; a row without a draft makes a plain step."""
    rows = [1, 2, 90, 90, 3, 4, 5, 6, 7, 90, 90, 90]
    together = outcomes(verified(rows, [1, 1, 0]), [1, 3, 0])
    alone = [
        outcome_of(verified([1, 2], 1)),
        outcome_of(verified([3, 4, 5, 6], 1)),
        outcome_of(verified([7], 0)),
    ]
    assert [good(outcome) for outcome in together] == alone
    writers = [[origin.writer for origin in outcome.origins] for outcome in alone]
    assert writers == [["accepted", "bonus"], ["accepted", "correction"], ["step"]]
    assert alone[0].origins[0] == Origin("accepted", 0)


def test_a_row_ends_for_its_own_unusable_logits_and_for_no_others() -> None:
    rows = verified([1, 2, 3, 4, 5, 6], [1, 0, 1], unusable=(1, 3))
    first, second, third = outcomes(rows, [1, 1, 1])
    assert isinstance(first, NonFiniteLogitsError)
    assert good(second).tokens == [3]  # logits after its rejection are ignored
    assert good(third).tokens == [5, 6]


def test_unusable_logits_after_a_rejection_are_not_looked_at() -> None:
    assert outcome_of(verified([8, 9], 0, unusable=(1,))).tokens == [8]
    (outcome,) = outcomes(verified([8, 9], 1, unusable=(1,)), [1])
    assert isinstance(outcome, NonFiniteLogitsError)
    assert "1 of 2 rows" in str(outcome)


def test_what_is_accepted_is_counted_before_the_cut_and_what_is_emitted_after() -> None:
    step = outcome_of(verified([9], 0))
    outcome = good(outcome_of(verified([1, 2, 3, 4], 3)).after_step(step))
    assert outcome.tokens == [9, 1, 2, 3, 4]

    def counted(stays: RoundOutcome) -> Statistics:
        statistics, rows = Statistics(), len(stays.tokens) - stays.first
        statistics.count(stays.drafted, stays.accepted, rows, first=stays.first)
        return statistics

    statistics = counted(outcome.until(3, "stop"))
    assert (statistics.rounds, statistics.drafts) == (2, 1)
    assert (statistics.drafted, statistics.accepted, statistics.emitted) == (3, 3, 3)
    statistics = counted(outcome.until(1, "stop"))
    assert (statistics.rounds, statistics.drafts, statistics.emitted) == (1, 0, 1)


def test_statistics_that_are_added_are_those_of_all_rounds() -> None:
    rounds = [(3, 1, 2, "lookup"), (2, 2, 3, "model"), (4, 3, 4, "lookup")]
    together, added = Statistics(), Statistics()
    for counts in rounds:
        alone = Statistics(reused=5, host_seconds=0.5)
        alone.count(*counts)
        added.add(alone)
        together.count(*counts)
    together.reused, together.host_seconds = 15, 1.5
    assert added == together
