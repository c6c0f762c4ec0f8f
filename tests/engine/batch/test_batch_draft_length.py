"""The width of a batch's rounds: by costs and acceptance, and never by the text."""

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_speculation import BatchGenerator
from mlx_speculation.engine.batch.draft_length import (
    BatchDraftLength,
    RowRates,
    row_bucket,
)
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.adaptive import AdaptiveDraftLength, Credit
from mlx_speculation.engine.draft_length.base import Feedback
from mlx_speculation.engine.draft_length.costs import RoundCosts
from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.models.shape_buckets import row_size
from support.drafters.batch_heads import head_bench
from support.drafters.batches import SAMPLINGS, Case, bench
from support.identity import prompt_of

LONGEST = 8


def rows_of(count: int) -> list[BatchRequest]:
    """Return rows whose lengths are chosen by measurement."""
    generator = bench("llama").generator("model", draft_length=None)
    streams = [generator.stream(prompt_of(3)) for _ in range(count)]
    return [BatchRequest(n, stream) for n, stream in enumerate(streams)]


def lengths_with(seconds: Any) -> BatchDraftLength:
    """Return lengths where a round of so many rows and drafts takes so long."""

    @cache
    def costs(rows: int) -> RoundCosts:
        return RoundCosts({0: {n: seconds(rows, n) for n in range(LONGEST + 1)}})

    def make(rates: AcceptanceRates) -> AdaptiveDraftLength:
        return AdaptiveDraftLength(RoundCosts(), rates, Credit(), LONGEST)

    return BatchDraftLength(make, lambda rows, _: costs(rows))


def play(
    lengths: BatchDraftLength, rows: list[BatchRequest], seconds: Any, right: float
) -> list[int]:
    """Run rounds in which a share of the drafts is right; return their widths."""
    found = []
    for _ in range(60):
        limits = lengths.limits(rows, 100, [50] * len(rows))
        width = max(limits)
        accepted = [int(width * right)] * len(rows)
        took = seconds(row_bucket(len(rows)), width)
        plain = width == 0
        outcome = Feedback(width, accepted[0], took, behind=plain, ahead=plain)
        lengths.note(rows, 100, limits, accepted, outcome)
        found.append(width)
    return found


def test_numbers_of_rows_share_costs_up_to_powers_of_two() -> None:
    assert [row_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 32)] == [
        *(1, 2, 4, 4, 8, 8, 16, 32)
    ]


@pytest.mark.usefixtures("measured")
def test_a_large_batch_whose_tokens_cost_like_rows_goes_down_to_plain_steps() -> None:
    def seconds(rows: int, drafted: int) -> float:
        return 1 + max(0, rows * (1 + drafted) - 8) / 4  # free up to 8 tokens

    for count, right in ((1, 0.8), (8, 0.3)):
        rows = rows_of(count)
        widths = play(lengths_with(seconds), rows, seconds, right)
        assert widths[0] == 0  # the first token does not wait for a draft
        if count == 1:
            assert min(widths[-20:]) >= 5
        else:
            assert sum(width > 0 for width in widths[-40:]) <= 4


@pytest.mark.usefixtures("measured")
def test_a_batch_that_shrinks_does_not_try_anew_at_each_size() -> None:
    """What trials lose at all sizes together is what they may lose at one."""

    def seconds(rows: int, drafted: int) -> float:
        return 1 + 0.8 * drafted  # pays where nearly all is accepted

    rows = rows_of(32)
    lengths = lengths_with(seconds)
    drafted = 0
    for number in range(64):
        stay = rows[: 32 - number // 2]
        limits = lengths.limits(stay, 100, [50] * len(stay), row_size(len(stay)))
        width = max(limits)
        drafted += width > 0
        took = seconds(0, width)
        plain = width == 0
        outcome = Feedback(width, 0, took, plain, plain, fresh=width > 0)
        lengths.note(stay, 100, limits, [0] * len(stay), outcome)
        if number % 2:
            lengths.leave()
    assert 0 < drafted <= 6


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("change", ["joins", "leaves", "sizes"])
def test_a_paused_batch_decides_anew_when_its_rows_change(change: str) -> None:
    """Several plain steps are decided at once, and other rows may be drafted for."""

    def seconds(rows: int, drafted: int) -> float:
        return 1 + 0.5 * drafted if rows < 8 else 1 + 2.0 * drafted

    rows = rows_of({"joins": 3, "leaves": 4, "sizes": 8}[change])
    lengths = lengths_with(seconds)
    for row in rows:
        lengths.join(row)
        for _ in range(40):
            row.rates.note(8, 8 if change == "sizes" else 0)
    widths = [1]
    while any(widths[-3:]) or len(widths) < 40:  # to where it is paused
        limits = lengths.limits(rows, 100, [50] * len(rows))
        widths.append(max(limits))
        plain = widths[-1] == 0
        outcome = Feedback(widths[-1], 0, 1.0, behind=plain, ahead=plain)
        lengths.note(rows, 100, limits, [0] * len(rows), outcome)
        assert len(widths) < 200
    if change == "joins":
        rows = [*rows, *rows_of(1)]
        lengths.join(rows[-1])
    elif change == "leaves":
        lengths.leave()
    else:
        rows = rows[:4]
    for row in rows:
        row.rates = AcceptanceRates([1.0] * LONGEST, 40.0)
    assert max(lengths.limits(rows, 100, [50] * len(rows))) > 0


@pytest.mark.usefixtures("measured")
def test_found_drafts_are_cut_to_the_width_that_pays() -> None:
    def seconds(rows: int, drafted: int) -> float:
        return 1 + 0.5 * drafted

    rows = rows_of(4)
    lengths = lengths_with(seconds)
    for row in rows:
        lengths.join(row)
        for _ in range(40):
            row.rates.note(8, 8)
    for _ in range(2):  # the first round is a plain step
        limits = lengths.limits(rows, 100, [50] * 4)
        if max(limits):
            break
        steady = Feedback(0, 0, 1.0, behind=True, ahead=True)
        lengths.note(rows, 100, [0] * 4, [0] * 4, steady)

    # Four rows of 8 pay for a round of 8, and one of 8 beside three of 1 does not.
    def width(*each: int, survival: list[float] | None = None, ahead: int = 0) -> int:
        found = [Proposal(mx.zeros(n, mx.uint32), survival=survival) for n in each]
        return lengths.width(rows, 100, found, ahead)

    assert width(8, 8, 8, 8) == 8
    assert width(8, 1, 1, 1) == 1
    assert width(8, 0, 0, 0) == 0
    # By the proposals' own chances, where they have some.
    assert width(8, 8, 8, 8, survival=[0.9, 0.8, 0.1]) == 2
    assert width(9, 9, 9, 9, survival=[0.9, 0.8, 0.1], ahead=1) == 1
    assert width(8, 8, 8, 8, survival=[0.4]) == 0


@pytest.mark.usefixtures("measured")
def test_no_row_drafts_more_than_its_request_wants() -> None:
    def seconds(rows: int, drafted: int) -> float:
        return 1.0  # a draft is free

    generator = bench("llama").generator("model", draft_length=None)
    asked = (None, 2, 0)
    streams = [generator.stream(prompt_of(3), max_draft=most) for most in asked]
    rows = [BatchRequest(n, stream) for n, stream in enumerate(streams)]
    for these, expected in ((rows, [8, 2, 0]), (rows[1:], [2, 0])):
        lengths = lengths_with(seconds)
        found = []
        for _ in range(30):
            limits = lengths.limits(these, 100, [50] * len(these))
            plain = not max(limits)
            outcome = Feedback(max(limits), max(limits), 1.0, plain, plain)
            lengths.note(these, 100, limits, limits, outcome)
            found.append(limits)
        assert found[-1] == expected


@pytest.mark.usefixtures("measured")
def test_rows_expect_by_their_own_acceptance() -> None:
    rates, rows = RowRates(), rows_of(2)
    rates.rows = rows
    alone = [AcceptanceRates(), AcceptanceRates()]
    for _ in range(100):
        for row, own, accepted in zip(rows, alone, (4, 0), strict=True):
            rates.note_row(row, 4, accepted)
            own.note(4, accepted)
    good, bad = (row.rates.expected(4)[-1] for row in rows)
    assert [good, bad] == [own.expected(4)[-1] for own in alone]
    assert bad < 1.2 < 4.7 < good
    assert rates.expected(4)[-1] == pytest.approx((good + bad) / 2)
    assert bad < rates.for_row().expected(4)[-1] < good


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("kind", ["model", "lookup", "mtp"])
def test_lengths_by_measurement_change_no_text(kind: str) -> None:
    made = head_bench("llama") if kind == "mtp" else bench("llama")
    generator = made.generator(kind, draft_length=None)
    cases = [Case(p, s, 18) for p in (2, 23) for s in SAMPLINGS[:3]]
    cases[1] = Case(2, SAMPLINGS[1], 18, draft_length=3)
    with BatchGenerator(generator) as batch:
        uids = [made.insert(batch, case) for case in cases]
        while batch.waiting or batch.running:
            batch.next()
        for uid, case in zip(uids, cases, strict=True):
            made.check(case, batch.result(uid).tokens, width=17)
        assert batch.stats.drafted > 0
        assert set(generator.lengths._batches) >= {8}


@pytest.mark.usefixtures("measured")
def test_a_batch_that_shrinks_begins_with_what_the_larger_one_has_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    lengths = bench("llama").generator("model", draft_length=None).lengths
    costs = lengths.batch_costs(8, RowRates())
    for length, seconds in ((0, 1.0), (4, 3.0)):
        for _ in range(3):
            costs.note(100, length, seconds)
    smaller = lengths.batch_costs(4, RowRates())
    assert smaller is not costs
    assert smaller.table() == {0: {0: 1.0, 4: 3.0}}
    smaller.note(100, 0, 0.5)
    assert costs.table() == {0: {0: 1.0, 4: 3.0}}
    assert lengths.batch_costs(16, RowRates()).table() == {0: {0: 1.0, 4: 3.0}}
