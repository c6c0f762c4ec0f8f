"""Rounds drawn by Hypothesis on a cache under speculation and on its twin."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from mlx_speculation.caches import Speculation
from support.caches.cache_twins import (
    ENDINGS,
    Held,
    Kind,
    Plan,
    Rows,
    assert_same,
    detached,
    plans,
    read,
    ring_kinds,
)

ROUNDS = 4_000
# Factors of the number of rounds: QUICK in the default profile, at most LONG in others.
QUICK, LONG = 0.25, 25

WIDTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
FEWER = st.lists(st.integers(1, 4), min_size=1, max_size=3)
SINGLE_ROWS = st.lists(st.just(1), min_size=1, max_size=4)
MANY_SINGLE_ROWS = st.integers(1, 40).map(lambda count: [1] * count)
SMALL_RINGS = ring_kinds(st.integers(1, 12), st.integers(0, 4))
PREFILLS = st.lists(st.integers(1, 20), max_size=2)


class StopError(Exception):
    """Error of a forward that fails."""


class Counting(RuleBasedStateMachine):
    """A state machine that counts its rounds on its class."""

    rounds = 0


class Twins(Counting):
    """One cache under speculation, and its twin, which is fed only the kept rows."""

    sound = False

    def layers(self) -> list[Any]:
        return self.cache if isinstance(self.cache, list) else [self.cache]

    def begin(self, kind: Kind, prefill: list[int]) -> None:
        self.kind = kind
        self.cache, self.twin = kind.make(), kind.make()
        self.position = self.serial = 0
        for width in prefill:
            rows = self.rows(width)
            kind.forward(self.cache, rows)
            self.keep([rows], width)
        self.sound = True

    def rows(self, width: int, after: int = 0) -> Rows:
        """Return new rows; they begin `after` positions after the kept rows."""
        self.serial += width
        return Rows(
            self.position + after, tuple(range(self.serial - width, self.serial))
        )

    def keep(self, written: list[Rows], keep: int, singly: bool = False) -> None:
        for rows in written:
            rows = rows.head(min(keep, rows.width))
            keep -= rows.width
            self.position += rows.width
            one_by_one = singly and self.kind.any_width
            for write in rows.singly() if one_by_one else [rows][: rows.width]:
                self.kind.forward(self.twin, write)

    def check(self, probe: int) -> None:
        """Require that both caches look the same to later forwards."""
        caches = (self.cache, self.twin)
        actual, expected = read([self.kind.content(cache, probe) for cache in caches])
        assert_same(actual, expected, "the cache and its twin")

    def play(self, plan: Plan) -> None:
        type(self).rounds += 1
        self.sound = False
        total = sum(plan.widths)
        keep = plan.keep
        if plan.ending in ("whole", "native"):
            keep = total if keep else 0
        if plan.ending == "native":
            keep, written = total, self.write(self.layers(), plan, [])
        else:
            written = self.speculate(plan, keep)
        if ENDINGS[plan.ending]:
            self.keep(written, keep, plan.singly)
        if plan.check:
            self.check(plan.probe)
        self.sound = True

    def speculate(self, plan: Plan, keep: int) -> list[Rows]:
        views: list[tuple[Any, Any]] = []
        caches = list(self.layers())
        whole = plan.ending == "whole"
        kept = Held(caches, values=plan.watch != "never") if plan.isolated else None
        speculation = Speculation(caches, whole=whole, isolated=plan.isolated)
        with ending(plan), speculation as round_:
            written = self.write(round_.caches, plan, views)
            assert round_.written in (sum(plan.widths), None)
            if plan.watch == "before":
                compare(views)
            prepare(round_, plan, keep)
            if kept is not None:
                kept.assert_unchanged("the live cache before the commit")
            end(round_, plan, keep)
        if kept is not None and not ENDINGS[plan.ending]:
            kept.assert_unchanged("the live cache after the round")
        if plan.watch == "after":
            compare(views)
        assert all(map(operator.is_, caches, self.layers()))
        return written

    def write(self, caches: list[Any], plan: Plan, views: list[Any]) -> list[Rows]:
        """Write all rows; unless `plan.watch` is "never", collect views to compare."""
        native = detached(self.cache) if plan.watch != "never" else None
        cache = caches if isinstance(self.cache, list) else caches[0]
        written, after = [], 0
        for width in plan.widths:
            rows = self.rows(width, after)
            shown = self.kind.forward(cache, rows)
            if native is not None:
                views.append((shown, self.kind.forward(native, rows)))
            written.append(rows)
            after += width
        return written

    def teardown(self) -> None:
        if self.sound:
            self.check(1)
            self.check(3)


@contextmanager
def ending(plan: Plan) -> Iterator[None]:
    if plan.ending != "raise":
        yield
        return
    with pytest.raises(StopError):
        yield


def prepare(speculation: Speculation, plan: Plan, keep: int) -> None:
    if plan.ending.startswith("prepare"):
        everything = "all" in plan.ending
        speculation.prepare(sum(plan.widths) if everything else keep)


def end(speculation: Speculation, plan: Plan, keep: int) -> None:
    if plan.ending == "raise":
        raise StopError
    if "commit" in plan.ending or plan.ending == "whole":
        speculation.commit(keep)
    if "roll back" in plan.ending:
        speculation.rollback()


def compare(views: list[tuple[Any, Any]]) -> None:
    """Require that each forward saw the same as with the native copy."""
    for shown, expected in read(views):
        assert_same(shown, expected, "the view of a forward")


def run(
    kinds: st.SearchStrategy[Kind],
    *,
    widths: st.SearchStrategy[list[int]] = WIDTHS,
    prefills: st.SearchStrategy[list[int]] = PREFILLS,
    share: float = 1.0,
    steps: int = 50,
    rarely: bool = False,
) -> int:
    """Play `share` of `ROUNDS` rounds, scaled by the profile; see `played`."""

    class Machine(Twins):
        @initialize(kind=kinds, prefill=prefills)
        def open(self, kind: Kind, prefill: list[int]) -> None:
            self.begin(kind, prefill)

        @rule(plan=plans(widths, rarely))
        def round(self, plan: Plan) -> None:
            self.play(plan)

    return played(Machine, share * ROUNDS, steps)


def played(machine: type[Counting], rounds: float, steps: int) -> int:
    """Run a state machine until it has played enough rounds; return their number.

    `rounds` is multiplied by `QUICK` in the default profile, and by up to `LONG` in
    longer profiles. `steps` is the largest number of steps of one example.
    """
    profile = settings.default
    assert profile is not None
    usual = settings.get_profile("default").max_examples
    times = profile.max_examples // usual
    wanted = int(rounds * (min(LONG, times) if times > 1 else QUICK))
    while (missing := wanted - machine.rounds) > 0:
        # Some examples stop early, so one run may play too few rounds.
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=missing // steps + 2, stateful_step_count=steps
            ),
        )
    return machine.rounds
