"""Rounds drawn by Hypothesis on a batch cache, and on a single cache for each row."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from mlx_speculation.caches import Speculation
from support.caches.batch_twins import (
    BatchKind,
    batch_copy,
    sees,
)
from support.caches.cache_twins import Held, Rows, assert_same, detached, read
from support.caches.twin_rounds import Counting

MOST_ROWS = 4

WIDTHS = st.lists(st.integers(1, 6), min_size=1, max_size=3)
SINGLE_ROWS = st.lists(st.just(1), min_size=1, max_size=4)
PROMPTS = st.lists(st.integers(0, 12), min_size=1, max_size=3)
BEGINNINGS = ("merged", "left", "right")
ENDINGS = {  # ending -> whether the tokens that `Plan.keep` counts stay
    "commit": True,
    "prepare, commit": True,
    "whole": True,
    "native": True,
    "commit, roll back": False,
    "prepare, leave": False,
    "raise": False,
}


def same(actual: Any, expected: Any, what: str) -> None:
    one, other = read([actual, expected])
    assert_same(one, other, what)


class StopError(Exception):
    """Error of a forward that fails."""


@dataclass(slots=True)
class Row:
    """A row's twin: a single cache that is fed only the row's kept tokens."""

    twin: Any
    position: int = 0
    fed: list[Rows] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """One round, like `cache_twins.Plan`; `keep` counts the kept tokens of each row."""

    widths: tuple[int, ...]
    keep: tuple[int, ...]
    ending: str
    watch: bool
    check: bool
    probe: int
    isolated: bool


@st.composite
def plans(draw: st.DrawFn, widths: st.SearchStrategy[list[int]]) -> Plan:
    drawn = tuple(draw(widths))
    number = st.integers(0, sum(drawn))
    even = draw(st.integers(0, 3)) == 0
    some = st.lists(number, min_size=MOST_ROWS, max_size=MOST_ROWS)
    return Plan(
        widths=drawn,
        keep=(draw(number),) * MOST_ROWS if even else tuple(draw(some)),
        ending=draw(st.sampled_from(("commit",) * 6 + tuple(ENDINGS))),
        watch=draw(st.integers(0, 3)) == 0,
        check=draw(st.integers(0, 1)) == 0,
        probe=draw(st.integers(1, 6)),
        isolated=draw(st.integers(0, 3)) == 0,
    )


class Batch(Counting):
    """One batch cache under speculation, and a twin for every row."""

    sound = False

    def begin(self, kind: BatchKind, prompts: list[int], how: str) -> None:
        self.kind = kind
        self.serial = 0
        self.cache, self.rows = self.made(prompts, how)
        self.sound = True

    def made(self, prompts: list[int], how: str) -> tuple[Any, list[Row]]:
        """Return a batch cache with prompts of these lengths, and twins of its rows."""
        rows = [Row(self.kind.single()) for _ in prompts]
        longest = max(prompts)
        if how == "merged" or longest == 0:
            for row, length in zip(rows, prompts, strict=True):
                self.feed(row, [self.fresh(row, length)], length)
            return self.kind.merge([batch_copy(row.twin) for row in rows]), rows
        if longest == 1:  # rotating caches refuse a right-padded write of one column
            how = "left"
        gaps = [longest - length for length in prompts]
        written = []
        cache = self.kind.batch(gaps if how == "left" else [0] * len(gaps))
        for row, length, gap in zip(rows, prompts, gaps, strict=True):
            before = gap if how == "left" else 0
            prompt = self.fresh(row, length)
            self.feed(row, [prompt], length)
            serials = (0,) * before + prompt.serials + (0,) * (gap - before)
            written.append(Rows(-before, serials))
        if how == "right":
            cache.prepare(lengths=prompts, right_padding=gaps)
        with Speculation([cache], whole=True) as speculation:
            self.kind.write(speculation.caches[0], written)
            speculation.commit(longest)
        if how == "right":
            cache.finalize()
        return cache, rows

    def fresh(self, row: Row, width: int, after: int = 0) -> Rows:
        """Return new tokens; they begin `after` positions after the kept tokens."""
        self.serial += width
        serials = tuple(range(self.serial - width + 1, self.serial + 1))
        return Rows(row.position + after, serials)

    def feed(self, row: Row, written: list[Rows], keep: int) -> None:
        for rows in written:
            kept = rows.head(min(max(keep, 0), rows.width))
            keep -= rows.width
            row.position += kept.width
            if kept.width:
                self.kind.write(row.twin, [kept])
                row.fed.append(kept)

    def check(self, probe: int) -> None:
        """Require that each row and its twin look the same to later rounds."""
        starts = [row.position for row in self.rows]
        views = sees(self.kind, self.cache, starts, probe)
        for index, row in enumerate(self.rows):
            what = f"row {index} of {len(self.rows)}"
            contents = self.kind.cached(self.cache, index)
            expected = self.kind.cached(row.twin, None)
            if row.position:
                same(contents, expected, what)
            alone = sees(self.kind, row.twin, [row.position], probe)
            same(views[index], alone[0], what)
            if row.position and not self.cache.empty():
                out = self.cache.extract(index)
                shown = sees(self.kind, out, [row.position], probe)
                same(shown[0], alone[0], f"{what}, extracted")

    def play(self, plan: Plan) -> None:
        type(self).rounds += 1
        self.sound = False
        total = sum(plan.widths)
        keep = list(plan.keep[: len(self.rows)])
        if plan.ending in ("whole", "native"):
            keep = [total] * len(self.rows)
        undone = (
            None if ENDINGS[plan.ending] else self.kind.fields(batch_copy(self.cache))
        )
        if plan.ending == "native":
            written = self.write(self.cache, plan)
        else:
            written = self.speculate(plan, keep)
        if undone is None:
            for row, number, tokens in zip(self.rows, keep, written, strict=True):
                self.feed(row, tokens, number)
        else:
            same(self.kind.fields(self.cache), undone, "undone")
        if plan.check:
            self.check(plan.probe)
        self.sound = True

    def speculate(self, plan: Plan, keep: list[int]) -> list[list[Rows]]:
        caches, whole = [self.cache], plan.ending == "whole"
        speculation = Speculation(caches, whole=whole, isolated=plan.isolated)
        kept = Held(caches, values=plan.watch) if plan.isolated else None
        try:
            with speculation:
                written = self.write(speculation.caches[0], plan)
                assert speculation.written in (sum(plan.widths), None)
                if plan.ending == "raise":
                    raise StopError
                if plan.ending.startswith("prepare"):
                    speculation.prepare(keep)
                if kept is not None:
                    kept.assert_unchanged("the live cache before the commit")
                if "commit" in plan.ending or plan.ending == "whole":
                    even = len(set(keep)) == 1 and plan.check
                    speculation.commit(keep[0] if even else keep)
                if "roll back" in plan.ending:
                    speculation.rollback()
        except StopError:
            pass
        return written

    def write(self, shown: Any, plan: Plan) -> list[list[Rows]]:
        """Write new tokens; if `plan.watch`, compare the views of rows and of twins."""
        written: list[list[Rows]] = [[] for _ in self.rows]
        twins = [detached(row.twin) for row in self.rows] if plan.watch else []
        after = 0
        for width in plan.widths:
            rows = [self.fresh(row, width, after) for row in self.rows]
            views = self.kind.write(shown, rows)
            after += width
            for index, each in enumerate(rows):
                written[index].append(each)
                if plan.watch and plan.ending != "native":
                    alone = self.kind.write(twins[index], [each])
                    same(views[index], alone[0], f"a view, row {index}")
        return written

    def leave(self, stay: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.cache.filter(mx.array(stay))
        self.rows = [self.rows[index] for index in stay]

    def join(self, prompts: list[int], how: str) -> None:
        cache, rows = self.made(prompts, how)
        self.cache.extend(cache)
        self.rows += rows

    def teardown(self) -> None:
        if self.sound:
            self.check(1)
            self.check(3)


def drawn(
    base: type[Batch],
    kinds: st.SearchStrategy[Any],
    widths: st.SearchStrategy[list[int]] = WIDTHS,
    beginnings: tuple[str, ...] = BEGINNINGS,
) -> type[Batch]:
    """Return a state machine that draws rounds, and rows that leave and join."""

    class Machine(base):  # type: ignore[valid-type,misc]
        @initialize(kind=kinds, prompts=PROMPTS, how=st.sampled_from(beginnings))
        def open(self, kind: BatchKind, prompts: list[int], how: str) -> None:
            self.begin(kind, prompts, how)

        @rule(plan=plans(widths))
        def round(self, plan: Plan) -> None:
            self.play(plan)

        @rule(plan=plans(widths))
        def another_round(self, plan: Plan) -> None:
            self.play(plan)

        @precondition(lambda self: len(self.rows) > 1)
        @rule(data=st.data())
        def some_rows_leave(self, data: st.DataObject) -> None:
            order = data.draw(st.permutations(range(len(self.rows))))
            self.leave(list(order)[: data.draw(st.integers(1, len(order)))])

        @precondition(lambda self: len(self.rows) < MOST_ROWS)
        @rule(length=st.integers(0, 12), how=st.sampled_from(beginnings))
        def a_row_joins(self, length: int, how: str) -> None:
            self.join([length], how)

    return Machine
