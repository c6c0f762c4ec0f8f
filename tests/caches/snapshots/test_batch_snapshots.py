"""A snapshot of a batch keeps its rows, whatever happens to the batch afterwards.

Snapshots are taken and restored between the rounds of test_batch_twins.py. Each must
equal twins that were fed only the tokens of its rows, and continue as the twins do.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models.cache import BatchKVCache

from mlx_speculation.caches import Snapshot, merge, restore, snapshot, split
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError
from support.caches.batch_rounds import MOST_ROWS, Batch, Plan, Row, drawn
from support.caches.batch_twins import AttentionKind, BatchArraysKind, BatchKind
from support.caches.cache_twins import Mixers, Rows

LITTLE = (False, False, 1, False)  # fields of a `Plan` after `ending`; no checks
Fed = list[list[Rows]]  # what each row was fed


@dataclass(eq=False)
class Taken:
    """A snapshot of the positions [0, stop), and the writes to its rows."""

    snapshot: Snapshot
    fed: Fed


class Machine(Batch):
    taken: list[Taken]

    def begin(self, kind: BatchKind, prompts: list[int], how: str) -> None:
        self.taken = []
        super().begin(kind, prompts, how)

    @rule()
    def take(self) -> None:
        stop = max(row.position for row in self.rows)
        taken = snapshot([self.cache], 0, stop)
        assert taken.stop == stop
        self.taken.append(Taken(taken, [list(row.fed) for row in self.rows]))

    @rule(count=st.integers(1, 7))
    def single_steps(self, count: int) -> None:
        """Run plain steps, which can make a ring wrap."""
        self.play(Plan((1,) * count, (count,) * MOST_ROWS, "native", *LITTLE))

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), fresh=st.booleans())
    def go_back(self, data: st.DataObject, fresh: bool) -> None:
        """Restore a snapshot to the live cache, or to a new one."""
        one = data.draw(st.sampled_from(self.taken))
        if fresh:
            self.cache = self.kind.batch([0])
        head, tail = split(one.snapshot, one.snapshot.stop)
        restore(merge(head, tail), [self.cache])
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
        """Require that the snapshot equals its twins, and continues as they do."""
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


KINDS: dict[str, Any] = {
    "kv": AttentionKind(step=4),
    "ring": AttentionKind(window=5, step=3),
    "arrays": None,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_snapshot_of_a_batch_equals_twins_that_saw_only_its_tokens(
    name: str, hooked: dict[str, Mixers]
) -> None:
    kind = KINDS[name] or BatchArraysKind(hooked["lfm2"])
    profile = settings.default
    assert profile is not None
    examples = profile.max_examples // 4
    limits = settings(max_examples=examples, stateful_step_count=25)
    run_state_machine_as_test(drawn(Machine, st.just(kind)), settings=limits)


def batch(padding: list[int], rows: int) -> Any:
    cache: Any = BatchKVCache(padding)
    block = mx.zeros((len(padding), 1, rows, 2))
    cache.update_and_fetch(block, block)
    return cache


def test_a_batch_is_cut_only_where_it_was_taken() -> None:
    cache = batch([0, 2], 6)
    with pytest.raises(UnsupportedCacheError, match=r"0 is a BatchKV.*only at 6"):
        snapshot([cache], 0, 4)
    with pytest.raises(UnsupportedCacheError, match=r"0 is a BatchKV.*only at 6"):
        split(snapshot([cache]), 4)


def test_layers_out_of_step_are_refused() -> None:
    with pytest.raises(UnsupportedCacheError, match=r"only at 5.*not at 7"):
        snapshot([batch([0, 2], 5), batch([0, 2], 7)])
    with pytest.raises(InvalidRequestError, match="the caches, which hold"):
        snapshot([batch([3, 4], 2)])


def test_a_layer_of_a_batch_that_the_model_does_not_use_stays_empty() -> None:
    target: list[Any] = [batch([0, 0], 1), batch([0, 0], 1)]
    restore(snapshot([batch([0, 2], 5), BatchKVCache([0, 2])]), target)
    assert [cache.empty() for cache in target] == [False, True]
