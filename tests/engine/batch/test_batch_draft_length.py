"""Costs and acceptance decide the width of a batch's rounds; no text changes."""

from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import BatchGenerator
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.draft_length.base import Feedback, FixedDraftLength, Plan
from mlx_speculation.engine.draft_length.costs import RoundCosts, Source
from mlx_speculation.engine.draft_length.rule import (
    BATCH_CREDIT,
    FIRST_CREDIT,
    Credit,
)
from mlx_speculation.engine.draft_length.ruled import (
    BatchDraftLength,
    RuleDraftLength,
    row_bucket,
)
from mlx_speculation.engine.lookup.survival import AcceptanceRates
from mlx_speculation.models.shape_buckets import row_size
from support.drafters.batch_heads import head_bench
from support.drafters.batches import SAMPLINGS, Case, bench
from support.identity import prompt_of

LONGEST = 8


def rows_of(count: int, kind: str = "model") -> list[BatchRequest]:
    generator = bench("llama").generator(kind, draft_length=None)
    streams = [generator.stream(prompt_of(3)) for _ in range(count)]
    return [BatchRequest(n, stream) for n, stream in enumerate(streams)]


def lengths_with(
    seconds: Any, rows: list[BatchRequest], *, credit: Credit | None = None
) -> BatchDraftLength:
    """Return draft lengths for rounds that take `seconds(rows, drafted)`."""

    @cache
    def sources(count: int) -> list[Source]:
        costs = RoundCosts({0: {n: seconds(count, n) for n in range(LONGEST + 1)}})
        return [replace(policy(rows[0]).sources[0], costs=costs)]

    credit = credit or Credit(*BATCH_CREDIT)
    lengths = BatchDraftLength(sources, credit, LONGEST)
    lengths.take(rows)
    return lengths


def expect(rows: list[BatchRequest], *rates: float) -> None:
    """Let the rows forecast these rates, in turn."""
    for row, rate in zip(rows, cycle(rates), strict=False):
        survival = AcceptanceRates(first=rate).survival(range(9))
        policy(row).forecast = lambda _, survival=survival: [survival]


def policy(row: BatchRequest) -> RuleDraftLength:
    assert isinstance(row.policy, RuleDraftLength)
    return row.policy


def play(
    lengths: BatchDraftLength, rows: list[BatchRequest], seconds: Any, right: float
) -> list[int]:
    """Run rounds that accept the share `right` of each draft; return their widths."""
    widths = []
    for _ in range(60):
        limits = lengths.limits(rows, 100, [50] * len(rows))
        width = max(limits)
        accepted = [int(width * right)] * len(rows)
        took = seconds(row_bucket(len(rows)), width)
        plain = width == 0
        outcome = Feedback(width, accepted[0], took, behind=plain, ahead=plain)
        lengths.note(rows, 100, limits, accepted, outcome)
        widths.append(width)
    return widths


def test_numbers_of_rows_share_costs_up_to_powers_of_two() -> None:
    assert [row_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 32)] == [
        *(1, 2, 4, 4, 8, 8, 16, 32)
    ]


@pytest.mark.usefixtures("measured")
def test_a_large_batch_whose_tokens_cost_like_rows_goes_down_to_plain_steps() -> None:
    def seconds(rows: int, drafted: int) -> float:
        return 1 + max(0, rows * (1 + drafted) - 8) / 4  # 1 for up to 8 tokens

    for count, right in ((1, 0.8), (8, 0.3)):
        rows = rows_of(count)
        widths = play(lengths_with(seconds, rows), rows, seconds, right)
        assert widths[0] == 0  # the first token does not wait for a draft
        if count == 1:
            assert min(widths[-20:]) >= 5
        else:
            assert sum(width > 0 for width in widths[-40:]) <= 4


@pytest.mark.usefixtures("measured")
def test_a_batch_that_shrinks_does_not_try_anew_at_each_size() -> None:
    """All sizes together lose no more on trials than one size is allowed to."""

    def seconds(rows: int, drafted: int) -> float:
        return 1 + 0.5 * drafted  # pays if most tokens are accepted

    rows = rows_of(32)
    lengths = lengths_with(seconds, rows)
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
            lengths.take(stay)
    assert 0 < drafted <= 6


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("change", ["joins", "leaves", "sizes"])
def test_a_plan_is_made_anew_when_the_rows_change(change: str) -> None:
    def seconds(rows: int, drafted: int) -> float:
        return 1 + 0.1 * drafted if rows < 8 else 1 + 2.0 * drafted

    rows = rows_of({"joins": 3, "leaves": 4, "sizes": 8}[change])
    expect(rows, 0.0 if change != "sizes" else 1.0)
    lengths = lengths_with(seconds, rows)
    lengths.rule.credit.steps[0] = -0.1
    for _ in range(3):
        limits = lengths.limits(rows, 100, [50] * len(rows))
        assert not any(limits)
        steady = Feedback(0, 0, 1.0, behind=True, ahead=True)
        lengths.note(rows, 100, limits, [0] * len(rows), steady)
    assert not lengths.early(rows, 100, [50] * len(rows))
    lengths.note(rows, 100, [0] * len(rows), [0] * len(rows), steady)
    if change == "joins":
        rows = [*rows, *rows_of(1)]
        lengths.take(rows)
    elif change == "leaves":
        lengths.take(rows)
    else:
        rows = rows[:4]
    expect(rows, 1.0)
    lengths.rule.credit.steps[0] = 0.6
    assert max(lengths.limits(rows, 100, [50] * len(rows))) > 0


@pytest.mark.usefixtures("measured")
def test_found_drafts_are_cut_to_the_width_that_pays() -> None:
    def seconds(rows: int, drafted: int) -> float:
        return 1 + 0.5 * drafted

    rows, credit = rows_of(4, "lookup"), [50] * 4

    def width(*survival: list[float], behind: bool = False) -> int:
        lengths = lengths_with(seconds, rows, credit=Credit(24.0))
        limits = lengths.limits(rows, 100, credit)
        assert not any(limits)  # the first round is a plain step
        steady = Feedback(0, 0, 1.0, behind=True, ahead=True)
        lengths.note(rows, 100, limits, limits, steady)
        assert lengths.limits(rows, 100, credit) == [LONGEST] * 4
        offered = [[row] for row in survival]
        return lengths.choose(100, LONGEST, offered, behind=behind).length

    sure, none = [1.0] * 8, list[float]()
    assert width(sure, sure, sure, sure) == 8
    assert width(sure, [0.9], [0.9], [0.9]) == 1
    assert width(sure, none, none, none) == 0
    assert width(*[[0.9, 0.8, 0.1]] * 4) == 2
    assert width(*[[0.9, 0.8, 0.1]] * 4, behind=True) == 1
    assert width(*[[0.4]] * 4) == 0


@pytest.mark.usefixtures("measured")
def test_a_busy_device_is_hardly_asked_for_a_draft_of_few_rows() -> None:
    def seconds(rows: int, drafted: int) -> float:
        return 1 + 0.5 * drafted

    rows = rows_of(8)
    expect(rows, 0.95, 0.1, 0.1, 0.1)
    lengths = lengths_with(seconds, rows)
    widths = play(lengths, rows, seconds, right=0.25)
    assert sum(width > 0 for width in widths) <= 2


@pytest.mark.usefixtures("measured")
def test_no_row_drafts_more_than_its_request_wants() -> None:
    def seconds(rows: int, drafted: int) -> float:
        return 1.0  # a draft is free

    generator = bench("llama").generator("model", draft_length=None)
    most_drafted = (None, 2, 0)
    streams = [generator.stream(prompt_of(3), max_draft=most) for most in most_drafted]
    rows = [BatchRequest(n, stream) for n, stream in enumerate(streams)]
    for these, expected in ((rows, [8, 2, 0]), (rows[1:], [2, 0])):
        lengths = lengths_with(seconds, rows)
        seen = []
        for _ in range(30):
            limits = lengths.limits(these, 100, [50] * len(these))
            plain = not max(limits)
            outcome = Feedback(max(limits), max(limits), 1.0, plain, plain)
            lengths.note(these, 100, limits, limits, outcome)
            seen.append(limits)
        assert seen[-1] == expected


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
        assert set(generator.lengths._known) >= {8}


@pytest.mark.usefixtures("measured")
def test_a_batch_that_shrinks_begins_with_what_the_larger_one_has_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    lengths = bench("llama").generator("model", draft_length=None).lengths
    costs = lengths.batch_sources(8)[0].costs
    for length, seconds in ((0, 1.0), (4, 3.0)):
        for _ in range(3):
            costs.note(100, length, seconds)
    smaller = lengths.batch_sources(4)[0].costs
    assert smaller is not costs
    assert smaller.table() == {0: {0: 1.0, 4: 3.0}}
    smaller.note(100, 0, 0.5)
    assert costs.table() == {0: {0: 1.0, 4: 3.0}}
    assert lengths.batch_sources(16)[0].costs.table() == {0: {0: 1.0, 4: 3.0}}


@pytest.mark.usefixtures("measured")
def test_a_request_by_itself_drafts_on_the_credit_of_its_stream() -> None:
    lengths = bench("llama").generator("lookup", draft_length=None).lengths.for_batch()
    rule = lengths.rule
    for rows in (1, 2, 1):
        lengths.take(each := rows_of(rows, "lookup"))
        lengths.limits(each, 100, [50] * rows, rows)
        assert (rule.credit is policy(each[0]).credit) == (rows == 1)
    assert rule.credit.steps[0] == FIRST_CREDIT


@pytest.mark.usefixtures("measured")
def test_a_prediction_drafts_on_a_credit_that_other_texts_have_not_used() -> None:
    generator = bench("llama").generator("lookup", draft_length=None)
    streams = [
        generator.stream(prompt_of(3), prediction=given)
        for given in (None, [1, 2], None, [3])
    ]
    credits = [policy(BatchRequest(0, stream)).credit for stream in streams]
    assert credits[0] is credits[2]
    assert credits[1] is credits[3]
    credits[0].add(0, -100.0)
    assert credits[1].steps[0] == FIRST_CREDIT


def test_lookups_draft_in_one_round_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a round with drafts no step is in flight, so the next round drafts too."""
    made = bench("llama")
    prompts = [prompt_of(9), prompt_of(14)]
    text = made.generator("none").generate
    options: dict[str, Any] = {"max_tokens": 60, "stop_tokens": ()}
    wanted = [text(prompt, **options).tokens for prompt in prompts]
    generator = made.generator("lookup", draft_length=None)
    for rows in (1, 2):
        for source in generator.lengths.batch_sources(rows):
            seconds = {n: 0.01 + 0.0002 * n for n in range(17)}
            source.costs = RoundCosts({0: seconds})
    monkeypatch.setattr(RoundCosts, "note", lambda *_: None)
    with BatchGenerator(generator) as batch:
        pairs = zip(prompts, wanted, strict=True)
        uids = [batch.insert(p, prediction=t, **options) for p, t in pairs]
        while batch.waiting or batch.running:
            batch.next()
        assert [batch.result(uid).tokens for uid in uids] == wanted
        assert batch.stats.forwards <= 14


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_a_policy_learns_what_was_drafted_for_its_request(kind: str) -> None:
    """A draft's guess of the token of a step in flight does not count as drafted."""

    class Noted(FixedDraftLength):
        def __init__(self, length: int) -> None:
            super().__init__(length)
            self.feedback: list[Feedback] = []

        def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
            self.feedback.append(feedback)

    policies = [Noted(3), Noted(5)]
    with BatchGenerator(bench("llama").generator(kind)) as batch:
        uids = [
            batch.insert(prompt_of(9), draft_length=each, max_tokens=40, stop_tokens=())
            for each in policies
        ]
        while batch.waiting or batch.running:
            batch.next()
        for uid, each in zip(uids, policies, strict=True):
            stats = batch.result(uid).stats
            assert sum(one.drafted for one in each.feedback) == stats.drafted > 0
            assert sum(one.accepted for one in each.feedback) == stats.accepted
        assert batch.stats.forwards == batch.stats.rounds
