"""A snapshot of a batch keeps its rows, whatever happens to the batch afterwards.

The state machine of test_batch_twins.py runs; between its rounds snapshots are taken,
cut, joined and restored. Each snapshot has to equal twins that were fed the tokens of
its rows only, and to continue like them.
"""

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache

from mlx_speculation.caches import (
    Snapshot,
    Speculation,
    merge,
    restore,
    snapshot,
    split,
)
from mlx_speculation.caches.snapshots.snapshot import held_bytes
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError
from support.caches.batch_rounds import (
    MOST_ROWS,
    Batch,
    Plan,
    Row,
    drawn,
    same,
)
from support.caches.batch_twins import AttentionKind, BatchArraysKind, BatchKind
from support.caches.cache_twins import Mixers, Rows

LITTLE = (False, False, 1, False)  # the rest of a minimal plan
Fed = list[list[Rows]]  # of each row


@dataclass(eq=False)
class Taken:
    """A snapshot of [0, stop), and the writes to its rows."""

    snapshot: Snapshot
    fed: Fed

    @property
    def lengths(self) -> list[int]:
        return [sum(rows.width for rows in fed) for fed in self.fed]


def cut(fed: list[Rows], stop: int) -> list[Rows]:
    return [rows.head(stop - rows.position) for rows in fed if rows.position < stop]


class Machine(Batch):
    """The batch, its twins, and the snapshots of it."""

    cuts: bool
    taken: list[Taken]

    def begin(self, kind: BatchKind, prompts: list[int], how: str) -> None:
        self.taken = []
        super().begin(kind, prompts, how)

    @property
    def furthest(self) -> int:
        return max(row.position for row in self.rows)

    @property
    def fed(self) -> Fed:
        return [list(row.fed) for row in self.rows]

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """Take a snapshot whole, in two parts, or as the rest after an older one."""
        stop, fed = self.furthest, self.fed
        taken = snapshot([self.cache], 0, stop)
        assert taken.stop == stop
        older = [one for one in self.taken if one.snapshot.lags == taken.lags]
        older = [one for one in older if self.goes_on(one, fed)]
        how = data.draw(st.sampled_from(["one", "two", "rest"]))
        if how == "rest" and older:
            parent = data.draw(st.sampled_from(older)).snapshot
            taken = merge(parent, snapshot([self.cache], parent.stop, stop))
        elif how == "two" and self.cuts:
            at = data.draw(st.integers(0, stop))
            parts = snapshot([self.cache], 0, at), snapshot([self.cache], at, stop)
            taken = merge(*parts)
        self.taken.append(Taken(taken, fed))

    @rule(count=st.integers(1, 7))
    def single_steps(self, count: int) -> None:
        """Run plain steps, after which a ring has wrapped."""
        self.play(Plan((1,) * count, (count,) * MOST_ROWS, "native", *LITTLE))

    @precondition(lambda self: self.cuts and min(r.position for r in self.rows) > 1)
    @rule(data=st.data(), width=st.integers(1, 4))
    def trim_and_write(self, data: st.DataObject, width: int) -> None:
        """Trim by mlx-lm's method, which does not change the buffers, and write."""
        shortest = min(row.position for row in self.rows)
        rows = data.draw(st.integers(1, min(6, shortest - 1)))
        self.cache.trim(rows)
        self.rows = self.twins([cut(r.fed, r.position - rows) for r in self.rows])
        self.play(Plan((width,), (width,) * MOST_ROWS, "native", *LITTLE))

    def goes_on(self, one: Taken, fed: Fed) -> bool:
        """Return whether each row has its old content, and equally many more tokens."""
        pairs = list(zip(one.fed, fed, strict=False))
        heads = all(now[: len(then)] == then for then, now in pairs)
        return heads and len(one.fed) == len(fed)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), how=st.sampled_from(["part", "whole", "copy", "drop"]))
    def change(self, data: st.DataObject, how: str) -> None:
        """Cut and join a snapshot, or keep its parts as separate snapshots."""
        one = data.draw(st.sampled_from(self.taken))
        at = data.draw(st.integers(0, one.snapshot.stop))
        if how == "drop":
            self.taken.remove(one)
        elif how == "copy":
            one.snapshot = one.snapshot.copied()
        elif how == "whole":
            head, tail = split(one.snapshot.ranges, at)
            one.snapshot = merge(merge(head, tail), one.snapshot.states)
        elif self.cuts:
            head, tail = split(one.snapshot, at)
            if at >= max(one.snapshot.lags):  # every row has begun
                ends = [at - lag for lag in one.snapshot.lags]
                fed = [cut(*each) for each in zip(one.fed, ends, strict=True)]
                self.taken.append(Taken(head, fed))
            one.snapshot = merge(head, tail)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), fresh=st.booleans(), parts=st.booleans())
    def go_back(self, data: st.DataObject, fresh: bool, parts: bool) -> None:
        """Restore a snapshot to the live cache, or to a new one."""
        one = data.draw(st.sampled_from(self.taken))
        if fresh:
            self.cache = self.kind.batch([0])
        if parts and self.cuts:
            for part in split(
                one.snapshot, data.draw(st.integers(0, one.snapshot.stop))
            ):
                restore(part, [self.cache])
        else:
            restore(one.snapshot, [self.cache])
        self.rows = self.twins(one.fed)

    def twins(self, fed: Fed) -> list[Row]:
        rows = [Row(self.kind.single()) for _ in fed]
        for row, each in zip(rows, fed, strict=True):
            self.feed(row, each, sum(rows.width for rows in each))
        return rows

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        self.compare(data.draw(st.sampled_from(self.taken)))

    def compare(self, one: Taken) -> None:
        """Require that the snapshot equals twins, and continues like them."""
        live = self.cache, self.rows
        self.cache, self.rows = self.kind.batch([0]), self.twins(one.fed)
        restore(one.snapshot, [self.cache])
        self.check(1)
        self.check(4)
        for width in (1, 3, 1):
            self.play(Plan((width,), (width,) * MOST_ROWS, "native", *LITTLE))
            self.check(2)
        self.cache, self.rows = live

    def teardown(self) -> None:
        super().teardown()
        for one in self.taken if self.sound else []:
            self.compare(one)


KINDS: dict[str, tuple[Any, bool]] = {
    "kv": (AttentionKind(step=4), True),
    "ring": (AttentionKind(window=5, step=3), False),
    "arrays": (None, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_snapshot_of_a_batch_equals_twins_that_saw_only_its_tokens(
    name: str, hooked: dict[str, Mixers]
) -> None:
    kind, can_be_cut = KINDS[name]
    kind = kind or BatchArraysKind(hooked["lfm2"])

    class OfKind(Machine):
        cuts = can_be_cut

    profile = settings.default
    assert profile is not None
    examples = profile.max_examples // 4
    limits = settings(max_examples=examples, stateful_step_count=25)
    run_state_machine_as_test(drawn(OfKind, st.just(kind)), settings=limits)


def batch(*lengths: int, rows: int = 0) -> Any:
    """Return a batch of prompts, merged, with buffers of about a megabyte."""
    singles = []
    for index, length in enumerate(lengths):
        single, block = KVCache(), mx.full((1, 4, length, 64), float(index + 1))
        single.update_and_fetch(block, block)
        singles.append(single)
    cache: Any = BatchKVCache.merge(singles)
    block = mx.zeros((len(lengths), 4, rows, 64))
    if rows:
        mx.eval(cache.update_and_fetch(block, block))
    return cache


def write(cache: Any, rows: int = 1, value: float = 9.0) -> None:
    block = mx.full((cache.offset.shape[0], 4, rows, 64), float(value))
    mx.eval(cache.update_and_fetch(block, block))


def test_a_snapshot_of_a_live_batch_copies_nothing_while_writes_go_past_it() -> None:
    cache = batch(500, 300, rows=1)
    whole = cache.keys.nbytes
    taken = snapshot([cache])
    assert (taken.nbytes, taken.stop, taken.lags) == (0, 501, (0, 200))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(20):
        write(cache)
    assert mx.get_peak_memory() - before < whole // 10
    assert taken.nbytes == 0
    cache.trim(30)
    write(cache)
    assert taken.nbytes == held_bytes([taken]) == 2 * 2 * 4 * 501 * 64 * 4
    assert type(cache) is BatchKVCache
    fresh: Any = BatchKVCache([0])
    restore(taken, [fresh])
    assert fresh.keys_and_values()[0].max().item() == 2.0
    assert fresh.offset.tolist() == [501, 301]


def test_a_watched_batch_counts_as_a_batch() -> None:
    cache = batch(5, 3)
    taken = snapshot([cache])
    assert type(cache) is not BatchKVCache
    with Speculation([cache]) as speculation:
        write(speculation.caches[0], rows=3)
        speculation.commit([3, 1])
    restored: Any = BatchKVCache([0])
    restore(taken, [restored])
    same(restored.extract(1).state, batch(5, 3).extract(1).state, "row 1")


def test_parts_of_a_batch_adjoin_while_its_rows_move_together() -> None:
    cache = batch(5, 3)
    head = snapshot([cache])
    with Speculation([cache]) as speculation:
        write(speculation.caches[0], rows=3)
        speculation.commit([3, 1])
    tail = snapshot([cache], head.stop)
    with pytest.raises(InvalidRequestError, match=r"\[0, 2\].*\[0, 4\]"):
        merge(head, tail)
    target = batch(5, 3)
    with pytest.raises(InvalidRequestError, match=r"\[0, 2\].*\[0, 4\]"):
        restore(tail, [target])
    assert target.offset.tolist() == [5, 3]


def test_a_ring_of_a_batch_is_cut_only_where_it_was_taken() -> None:
    caches: list[Any] = [BatchKVCache([0, 2]), BatchRotatingKVCache(4, [0, 2])]
    for cache in caches:
        write(cache, rows=6)
    with pytest.raises(UnsupportedCacheError, match=r"1 is a BatchRot.*at 6 only"):
        snapshot(caches, 0, 4)
    with pytest.raises(UnsupportedCacheError, match=r"1 is a BatchRot.*at 6 only"):
        split(snapshot(caches), 4)


def test_padding_that_all_rows_share_does_not_hide_a_write_into_the_range() -> None:
    cache: Any = BatchKVCache([2, 3])
    write(cache, rows=6)
    taken = snapshot([cache])
    assert taken.stop == 4
    cache.trim(1)
    cache.update_and_fetch(mx.zeros((2, 4, 1, 64)), mx.zeros((2, 4, 1, 64)))
    restored: Any = BatchKVCache([0])
    restore(taken, [restored])
    assert restored.keys_and_values()[0].min().item() == 9.0


def test_a_part_goes_on_from_rows_that_share_padding() -> None:
    cache: Any = BatchKVCache([2, 3])
    for part in range(4):
        write(cache, rows=2, value=part)
    rest = snapshot([cache], 2)
    cache.trim(4)
    restore(rest, [cache])
    keys = cache.keys_and_values()[0][0, 0, :, 0]
    assert keys.tolist() == [1, 1, 2, 2, 3, 3]
    assert (cache.offset.tolist(), cache.left_padding.tolist()) == ([6, 5], [0, 1])


def test_a_layer_of_a_batch_that_the_model_does_not_use_stays_empty() -> None:
    taken = snapshot([batch(5, 3), BatchKVCache([0, 2])])
    assert (taken.stop, taken.lags) == (5, (0, 2))
    target = [batch(1, 1), batch(1, 1)]
    restore(merge(*split(taken, 4)), target)
    assert [cache.empty() for cache in target] == [False, True]


def test_a_ring_of_a_batch_is_held_without_unused_slots() -> None:
    ring: Any = BatchRotatingKVCache(100, [0, 1])
    for _ in range(7):
        write(ring)
    assert ring.keys.shape[2] == 100
    fields = 2 * 2 * 4
    assert snapshot([ring]).nbytes == 2 * 2 * 4 * 7 * 64 * 4 + fields


def test_a_batch_that_waits_for_finalize_can_be_given_another_state() -> None:
    for make in (lambda: BatchKVCache([0, 0]), lambda: BatchRotatingKVCache(8, [0, 0])):
        one, other = cast(Any, make)(), cast(Any, make)()
        write(one, rows=3)
        other.prepare(lengths=[4, 2], right_padding=[0, 2])
        restore(snapshot([one]), [other])
        other.finalize()
        write(other)
        assert other.offset.tolist() == [4, 4]


def test_layers_out_of_step_and_unfinished_prompts_are_refused() -> None:
    one, other = batch(5, 3), batch(5, 3, rows=2)
    with pytest.raises(InvalidRequestError, match=r"0 hold \[5, 3\].*1 \[7, 5\]"):
        snapshot([one, other])
    unfinished: list[Any] = [BatchKVCache([0, 0]), BatchRotatingKVCache(8, [0, 0])]
    for cache in unfinished:
        cache.prepare(lengths=[4, 2], right_padding=[0, 2])
        write(cache, rows=4)
        with pytest.raises(InvalidRequestError, match=r"0 waits for finalize"):
            snapshot([cache])
        cache.finalize()
        assert snapshot([cache]).lags == (0, 2)
    with pytest.raises(InvalidRequestError, match=r"\[-3, -1\].*left padding"):
        snapshot([BatchKVCache([3, 1])])
