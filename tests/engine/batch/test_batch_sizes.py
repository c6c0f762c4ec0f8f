"""Batches padded to one of a few numbers of rows: shapes, costs, copies."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_speculation import BatchGenerator, NonFiniteLogitsError, Sampling, pure
from mlx_speculation.caches import RaggedKVCache
from mlx_speculation.engine.draft_length.base import Feedback, FixedDraftLength
from mlx_speculation.engine.draft_length.costs import RoundCosts, Source
from mlx_speculation.engine.draft_length.rule import Credit
from mlx_speculation.engine.draft_length.ruled import RuleDraftLength
from mlx_speculation.engine.shared_drafters.shared_model import SharedModel
from mlx_speculation.models import BatchLane, Lane, ModelHooks, RowSizes
from mlx_speculation.models.shape_buckets import row_size
from support.caches.cache_twins import read
from support.drafters.batch_heads import head_bench
from support.drafters.batches import SAMPLINGS, Case, Watched, bench, finish, run
from support.identity import prompt_of

Shapes = list[tuple[int, int]]
# To make these drafts, texts of the target are written first.
SLOW_TO_MAKE = ("lookup", "mtp", "eagle")


def cases_of(rows: int) -> list[Case]:
    """Return rows that end one by one."""
    kinds = SAMPLINGS[:4]
    return [Case(2, kinds[n % 4], 2 + 18 * n // rows) for n in range(rows)]


def play(kind: str, *, row_sizes: bool | None, **options: Any) -> tuple[Shapes, Shapes]:
    """Run 13 rows; return the input shapes of target and draft."""
    made = bench("llama")
    generator = made.generator(kind, **options)
    cases = cases_of(13)
    for case in cases:
        made.text(case.prompt, case.sampling)
    batch = BatchGenerator(generator, row_sizes=row_sizes)
    with batch, Watched(made.model) as target, Watched(made.draft) as draft:
        rows = {made.insert(batch, case): case for case in cases}
        batch.next()  # prompts
        target.clear()
        draft.clear()
        finish(made, batch, rows)
        assert batch.stats.row_rounds <= 13 * batch.stats.forwards
        assert batch.stats.emitted == sum(case.max_tokens for case in cases)
    return target, draft


def test_models_are_shown_few_numbers_of_rows() -> None:
    wide = {True: set[int](), False: set[int]()}
    for sizes in (True, False):
        for shapes in play("model", row_sizes=sizes):
            wide[sizes] |= {rows for rows, width in shapes if width > 1 and rows > 1}
    assert wide[True] <= {2, 3, 4, 6, 8, 12, 16}
    assert len(wide[True]) >= 4
    assert wide[False] & {5, 7, 9, 10, 11, 13}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", "mtp"), ("llama", "eagle"), ("llama", "lookup")),
        ("qwen3_5", "model"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in [("llama", "model"), *product(["qwen3_5"], SLOW_TO_MAKE)]
        ),
    ],
)
def test_models_are_shown_few_numbers_of_positions(name: str, kind: str) -> None:
    """Drafts have 5 tokens, and fewer at the end of a budget."""
    made = bench(name) if kind in ("model", "lookup") else head_bench(name)
    widths = {}
    for sizes in (True, False):
        batch = BatchGenerator(made.generator(kind, draft_length=5), row_sizes=sizes)
        with batch, Watched(made.model) as shapes:
            uids = {made.insert(batch, case): case for case in cases_of(6)}
            batch.next()  # prompts
            shapes.clear()
            finish(made, batch, uids)
            widths[sizes] = {width for rows, width in shapes if rows > 1}
    assert widths[True] <= {1, 2, 3, 4, 5, 7}
    assert 6 in widths[False]
    assert 7 in widths[True]


@pytest.mark.parametrize("kind", ["none", "model"])
def test_plain_decoding_is_shown_the_rows_that_there_are(kind: str) -> None:
    target, draft = play(kind, row_sizes=True, draft_length=0)
    assert not draft
    assert {5, 7, 9, 10, 11} <= {rows for rows, _ in target}


def test_sizes_are_not_used_on_a_cpu() -> None:
    assert play("model", row_sizes=None) == play("model", row_sizes=False)


@pytest.fixture(name="copied")
def _copied(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the old places of rows whenever a layer's cache copies its rows."""
    places: list[list[int]] = []
    usual = RaggedKVCache.filter

    def noted(self: RaggedKVCache, batch_indices: Any) -> None:
        places.append([int(place) for place in batch_indices.tolist()])
        usual(self, batch_indices)

    monkeypatch.setattr(RaggedKVCache, "filter", noted)
    return places


def test_rows_are_copied_only_where_the_size_changes(copied: list[list[int]]) -> None:
    made = bench("llama")
    rows = 13
    cases = [Case(6, SAMPLINGS[0], 4 + 2 * n) for n in range(rows)]
    layers = len(made.model.layers)
    sizes: list[int] = []
    with BatchGenerator(made.generator("lookup"), row_sizes=True) as batch:
        uids = {made.insert(batch, case): case for case in cases}
        while batch.waiting or batch.running:
            batch.next()
            sizes.append(batch._groups[None]._lane.places)
        finish(made, batch, uids)
    changes = sum(one != other for one, other in pairwise([rows, *sizes, 0]))
    assert changes >= 4
    assert len(copied) / layers <= changes
    assert len(copied) < 0.5 * layers * (len(sizes) + rows)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_a_row_that_has_left_changes_nothing_for_the_others(name: str) -> None:
    """The row's place stays in the batch until the size changes, and is not read."""
    model, rows, stay = bench(name).model, 6, [0, 1, 3, 4, 5]
    recorders = ModelHooks(model)  # lets states keep a part of a round
    fed = mx.array([[3 * row + 1, 3 * row + 2] for row in range(rows)])
    by_sizes: dict[bool, list[Any]] = {}
    for used in (True, False):
        lanes = [Lane(model) for _ in range(rows)]
        for row, lane in enumerate(lanes):
            lane.feed(prompt_of(5 + row))
        batch = BatchLane(model, RowSizes(used=used))
        batch.join(lanes)
        with batch.begin(2) as first:
            first.forward(fed)
            first.commit([2, 1, 0, 1, 2, 1])
        batch.leave(stay)
        by_sizes[used] = []
        with Watched(model) as shapes:
            for keep in ([1, 2, 0, 1, 2], [2, 0, 1, 1, 2]):
                with batch.begin(2) as lane_round:
                    logits = lane_round.forward(fed[mx.array(stay)])
                    by_sizes[used].append(read(logits))
                    lane_round.commit(keep)
        assert shapes == [(6 if used else 5, 2)] * 2
        for row in range(5):
            caches = batch.extract(row)
            by_sizes[used].append(read(model(mx.array([[9]]), cache=caches)))
    recorders.remove()
    for ours, others in zip(by_sizes[True], by_sizes[False], strict=True):
        np.testing.assert_allclose(ours, others, rtol=0, atol=1e-4)


def test_a_row_that_has_left_is_let_go_of_where_it_is_the_longest() -> None:
    model = bench("llama").model
    recorders = ModelHooks(model)
    lanes = [Lane(model) for _ in range(6)]
    for length, lane in zip((5, 300, 6, 7, 8, 9), lanes, strict=True):
        lane.feed(prompt_of(length))
    batch = BatchLane(model, RowSizes(used=True))
    batch.join(lanes)
    with batch.begin(2) as lane_round:
        lane_round.forward(mx.array([[1, 2]] * 6))
        lane_round.commit([1] * 6)
    recorders.remove()
    bytes_before = batch.nbytes
    batch.leave([0, 2, 3, 4, 5])
    assert batch.places == 6
    assert batch.nbytes < 0.6 * bytes_before


def let_draft(batch: BatchGenerator, length: int) -> None:
    for row in batch._groups[None].rows:
        lengths: Any = row.request.policy
        assert type(lengths) is FixedDraftLength
        FixedDraftLength.__init__(lengths, length)


def test_a_draft_that_has_missed_tokens_reads_them_in_few_widths() -> None:
    """One forward over all missed tokens would nearly always have a new width."""
    made = bench("llama")
    widths, contents = {}, []
    for sizes in (True, False):
        generator = made.generator("model")
        batch = BatchGenerator(generator, row_sizes=sizes)
        with batch, Watched(made.draft) as shapes:
            uids = [batch.insert(prompt_of(3), max_tokens=60) for _ in range(5)]
            drafts = batch.next() and batch._groups[None]._rounds.proposals.shared
            widths[sizes] = set[int]()
            for missed in (0, 1, 5, 11, 14):
                let_draft(batch, 0)
                for _ in range(missed):
                    batch.next()
                let_draft(batch, 3)
                shapes.clear()
                batch.next()
                batch.next()
                widths[sizes] |= {width for rows, width in shapes if rows > 1}
            assert isinstance(drafts, SharedModel)
            assert uids
            (first, *_) = drafts.lane.extract(2)
            contents.append(read(first.keys_and_values()))
    assert widths[True] <= {1, 2, 4, 8}
    assert widths[False] - {1, 2, 4, 8}
    for one, other in zip(*contents, strict=True):  # at whatever widths they were read
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_the_first_row_may_fail_which_the_copies_follow(kind: str) -> None:
    made = bench("llama")

    @pure
    def breaks(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * mx.nan if len(tokens) > 12 else logits

    with BatchGenerator(made.generator(kind), row_sizes=True) as batch:
        options = Sampling(logits_processors=[breaks])
        bad = batch.insert(prompt_of(6), sampling=options, stop_tokens=())
        rows = {made.insert(batch, case): case for case in cases_of(10)}
        finish(made, batch, rows)
        assert isinstance(batch.error(bad), NonFiniteLogitsError)
        assert (batch.stats.failed, batch.stats.finished) == (1, 11)


@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_copies_whose_logits_are_unusable_are_nobodys_concern(kind: str) -> None:
    made = bench("llama")
    cases = cases_of(5)
    for case in cases:
        made.text(case.prompt, case.sampling)
    generator = made.generator(kind)
    broken = 0

    class Breaking(type(made.model)):  # type: ignore[misc]
        """A model whose sixth row is NaN."""

        def __call__(self, inputs: mx.array, **options: Any) -> mx.array:
            nonlocal broken
            logits: mx.array = super().__call__(inputs, **options)
            if inputs.shape[0] < 6:
                return logits
            broken += 1
            sixth = mx.arange(inputs.shape[0])[:, None, None] == 5
            return mx.where(sixth, mx.nan, logits)

    Breaking.__module__ = type(made.model).__module__
    plain = type(made.model)
    models = (made.model, made.draft)
    try:
        for model in models:
            model.__class__ = Breaking
        with BatchGenerator(generator, row_sizes=True) as batch:
            rows = {made.insert(batch, case): case for case in cases}
            run(batch)
            results = {uid: batch.result(uid) for uid in rows}
    finally:
        for model in models:
            model.__class__ = plain
    assert broken
    for uid, case in rows.items():
        made.check(case, results[uid].tokens)
        assert not results[uid].stats.drafter_faults


@pytest.mark.parametrize(
    ("name", "forwards"),
    [("llama", (6, 7, 8)), ("gemma3_text", (7,)), ("qwen3_5", (8,))],
)
def test_a_round_that_fails_for_all_is_run_again(
    name: str, forwards: tuple[int, ...]
) -> None:
    made = bench(name)
    cases = [Case(2, sampling, 12) for sampling in SAMPLINGS[:5]]
    for case in cases:
        made.text(case.prompt, case.sampling)
    for forward in forwards:  # those before read the prompts
        with BatchGenerator(made.generator("model"), row_sizes=True) as batch:
            rows = {made.insert(batch, case): case for case in cases}
            with Watched(made.model, forward), pytest.raises(KeyboardInterrupt):
                run(batch)
            finish(made, batch, rows)


def test_what_the_first_round_of_a_shape_takes_is_not_what_rounds_cost() -> None:
    known = Source(RoundCosts({0: {0: 1.0, 4: 2.0}}))
    lengths = RuleDraftLength([known], Credit(), 8)
    lengths.plan(10, 50)
    plan = replace(lengths.plan(10, 50), length=4)
    lengths.note(10, plan, Feedback(4, 2, 50.0, fresh=True))
    assert known.costs.table() == {0: {0: 1.0, 4: 2.0}}
    assert known.rates.survival([0])[0] > 0.7  # acceptance is learned all the same
    for _ in range(5):
        lengths.note(10, plan, Feedback(4, 2, 50.0))
    assert known.costs.table()[0][4] > 2.0


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_costs_are_kept_by_the_rows_shown(kind: str) -> None:
    made = bench("llama")
    generator = made.generator(kind, draft_length=None)
    with BatchGenerator(generator, row_sizes=True) as batch:
        rows = {made.insert(batch, case): case for case in cases_of(11)}
        while batch.waiting or batch.running:
            batch.next()
        for uid, case in rows.items():
            made.check(case, batch.result(uid).tokens, width=17)
        known = set(generator.lengths._known) - {0}
    assert max(known) == 12
    assert min(known) < 6  # rows ended, down to smaller sizes
    assert known == {row_size(rows) for rows in known}
