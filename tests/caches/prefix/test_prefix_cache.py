"""A prefix cache returns the stored rows of the longest reusable prefix."""

import gc
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache

from mlx_speculation.caches import Left, Point, PrefixCache, snapshot
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError
from support.caches.prefix_roles import (
    EVERY,
    RING,
    ROW,
    ROWS,
    Kind,
    Owner,
    bound,
    request,
    snapshots,
)


def play(prefixes: PrefixCache, tokens: list[int], kind: Kind) -> None:
    request(prefixes, tokens, {0: (kind, 0)})


def test_of_leaves_that_cost_the_same_the_one_used_longest_ago_goes() -> None:
    prefixes, _owners = bound(10 * ROW, ROWS)
    for tokens in ([1, 1, 1, 1], [2, 2, 2, 2]):
        play(prefixes, tokens, ROWS)
    prefixes.lookup(0, [1, 1, 1])
    play(prefixes, [0, 0, 0, 0, 0], ROWS)
    assert prefixes.lookup(0, [2, 2]) is None
    reused = prefixes.lookup(0, [1, 1, 1, 1, 1])
    assert reused is not None
    assert reused.stop == 4
    assert prefixes.nbytes == 9 * ROW


def test_what_two_requests_share_is_held_once() -> None:
    prefixes, _owners = bound(1 << 20, ROWS)
    play(prefixes, [1] * 10 + [0] * 3, ROWS)
    assert prefixes.nbytes == 13 * ROW
    play(prefixes, [1] * 10 + [2] * 4, ROWS)
    assert prefixes.nbytes == 17 * ROW


def test_a_text_longer_than_the_budget_is_kept_in_part_or_not() -> None:
    prefixes, _owners = bound(100 * ROW, RING)
    play(prefixes, [1] * 200, RING)
    assert 0 < prefixes.nbytes <= 100 * ROW
    reused = prefixes.lookup(0, [1] * 200)
    assert reused is not None
    assert reused.stop > 20
    prefixes, _owners = bound(3 * ROW, ROWS)
    play(prefixes, [1] * 4, ROWS)
    assert prefixes.nbytes == 0


def points_of(prefixes: PrefixCache, tokens: list[int]) -> Any:
    """Play a request that is not finished; return its restore points."""
    caches, points = RING.empty(), prefixes.running_points()
    for stop in range(1, len(tokens) + 1):
        RING.feed(caches, tokens[:stop], stop - 1)
        if stop % EVERY == 0:
            prefixes.take(points, Point(stop, snapshot(caches, stop, stop)))
    return points


def test_restore_points_of_running_streams_are_inside_the_budget() -> None:
    prefixes, _owners = bound(60 * ROW, RING)
    play(prefixes, [1] * 20, RING)
    stored = prefixes.nbytes
    assert stored > 30 * ROW
    one = points_of(prefixes, [2] * 40)
    assert 30 * ROW <= one.nbytes < prefixes.nbytes <= 60 * ROW  # a part was evicted
    other = points_of(prefixes, [0] * 80)
    assert snapshots(prefixes) == []
    assert prefixes.nbytes == one.nbytes + other.nbytes <= 60 * ROW
    assert [point.stop for point in one.taken] == list(range(EVERY, 41, EVERY))
    places = [point.stop for point in other.taken]
    assert places[0] <= 2 * EVERY  # the first point can be evicted early
    assert places[-1] == 80
    gaps = [two - one for one, two in pairwise(places)]
    assert max(gaps) <= 4 * EVERY
    del one
    gc.collect()
    assert prefixes.nbytes == other.nbytes
    other.taken.clear()
    assert prefixes.nbytes == 0


def test_a_stream_that_is_dropped_while_another_is_stored_changes_nothing() -> None:
    prefixes, _owners = bound(1 << 20, RING)
    inner = points_of(prefixes, [2] * 12)

    class Dropping(list[int]):
        def __getitem__(self, at: Any) -> Any:
            prefixes.store([2] * 12, [Left(0, RING.fed([2] * 12), 12, inner.taken)])
            return super().__getitem__(at)

    tokens = [1] * 12
    prefixes.store(Dropping(tokens), [Left(0, RING.fed(tokens), 12, [])])
    assert prefixes.lookup(0, [2] * 12) is None
    reused = prefixes.lookup(0, tokens)
    assert reused is not None
    assert reused.stop == 12
    assert inner.nbytes == 0


@pytest.mark.usefixtures("exact_buffers")
def test_bytes_reported_are_bytes_held() -> None:
    prefixes, _owners = bound(1 << 30, RING)
    for tokens in ([1] * 9, [1] * 5 + [2] * 7, [0] * 6):
        play(prefixes, tokens, RING)
    gc.collect()
    reported, before = prefixes.nbytes, mx.get_active_memory()
    prefixes.clear()
    gc.collect()
    assert before - mx.get_active_memory() == reported > 0


def test_another_pair_of_models_is_refused() -> None:
    prefixes, (owner,) = bound(100, ROWS)
    prefixes.bind([owner], [ROWS.empty()])
    for others in ([Owner()], [owner, Owner()], []):
        with pytest.raises(InvalidRequestError, match="belongs to Owner"):
            prefixes.bind(others, [ROWS.empty() for _ in others])


def test_caches_of_other_kinds_are_refused() -> None:
    prefixes, owners = bound(100, RING)
    with pytest.raises(InvalidRequestError, match=r"RotatingKVCache with \(3, 0\)"):
        prefixes.bind(owners, [[KVCache(), RotatingKVCache(max_size=4)]])


def test_caches_that_no_snapshot_holds_are_refused() -> None:
    batch: Any = BatchKVCache([0])
    with pytest.raises(UnsupportedCacheError, match="BatchKVCache"):
        PrefixCache(100).bind([Owner()], [[batch]])


@pytest.mark.parametrize(("max_bytes", "every"), [(-1, 512), (10, 0)])
def test_numbers_out_of_range_are_refused(max_bytes: int, every: int) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"is {max_bytes} and every is {every}"
    ):
        PrefixCache(max_bytes, every=every)
