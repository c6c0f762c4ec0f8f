"""A prefix cache returns what was stored for the longest reusable beginning.

Each row that is written here carries its position and a digest of all tokens up to
it, so a row of another text, or of another place, reads as a number. Hypothesis plays
requests over three token ids, which share beginnings of any length, on rows alone and
on rows beside a ring; what is found is compared with the requests themselves.
"""

import gc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache

from mlx_speculation.caches import Point, PrefixCache, restore, snapshot
from mlx_speculation.caches.snapshots.snapshot import Snapshot, held_bytes
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError
from support.caches.cache_twins import assert_same, read

EVERY = 4


class Owner:
    """Stands for a model."""


def empty(stateful: bool) -> list[Any]:
    return [KVCache(), *([RotatingKVCache(max_size=3)] if stateful else [])]


def feed(caches: list[Any], tokens: Sequence[int], start: int) -> None:
    """Write a row for each token from `start` on, one by one."""
    for stop in range(start + 1, len(tokens) + 1):
        digest = float(hash(tuple(tokens[:stop])) % 99991)
        rows = mx.array([[[[float(stop), digest]]]])
        for cache in caches:
            cache.update_and_fetch(rows, -rows)


def fed(tokens: Sequence[int], stateful: bool) -> list[Any]:
    caches = empty(stateful)
    feed(caches, tokens, 0)
    return caches


def content(caches: list[Any]) -> Any:
    views: list[Any] = []
    for cache in caches:
        views.append(cache.offset)
        if not cache.empty():
            keys, values = cache.keys_and_values()
            order = mx.argsort(keys[0, 0, :, 0])
            views += [keys[:, :, order], values[:, :, order]]
    return read(views)


def bound(max_bytes: int, stateful: bool, count: int = 1) -> tuple[PrefixCache, Any]:
    prefixes = PrefixCache(max_bytes, every=EVERY)
    owners = [Owner() for _ in range(count)]
    prefixes.bind(owners, [empty(stateful) for _ in owners])
    return prefixes, owners


def snapshots(prefixes: PrefixCache) -> list[Snapshot]:
    nodes = [node for tree in prefixes._trees for node in tree.nodes()]
    return [x for node in nodes for x in (node.rows, node.states) if x is not None]


def request(
    prefixes: PrefixCache, tokens: list[int], stateful: bool, which: int = 0
) -> tuple[int, list[int]]:
    """Play one request; return where it was resumed, and its restore points."""
    caches = empty(stateful)
    held = prefixes.lookup(which, tokens[:-1])
    start = 0
    if held is not None:
        restore(held, caches)
        start = held.stop
        assert_same(
            content(caches), content(fed(tokens[:start], stateful)), "what was found"
        )
    points = prefixes.running_points()
    taken = []
    for stop in range(start + 1, len(tokens)):
        feed(caches, tokens[:stop], stop - 1)
        if stateful and stop % EVERY == 0:
            prefixes.take(points, Point(stop, snapshot(caches, stop, stop)))
            taken.append(stop)
            running = points.nbytes + sum(x.nbytes for x in snapshots(prefixes))
            assert prefixes.nbytes == running <= prefixes.max_bytes
    feed(caches, tokens, len(tokens) - 1)
    prefixes.store(which, tokens, caches, points)
    assert points.nbytes == 0
    return start, [*taken, len(tokens)]


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def expected(
    tokens: list[int], known: list[tuple[list[int], list[int]]], stateful: bool
) -> int:
    """Return where a request is resumed if nothing was forgotten."""
    best = 0
    for text, points in known:
        pairs = zip(text, tokens[:-1], strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if common is None:
            common = min(len(text), len(tokens) - 1)
        usable = [p for p in points if p <= common] if stateful else [common]
        best = max([best, *usable])
    return best


@pytest.mark.parametrize("stateful", [False, True])
@settings(max_examples=40)
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
def test_the_longest_reusable_beginning_is_found(
    stateful: bool, texts: list[list[int]]
) -> None:
    prefixes, _owners = bound(1 << 30, stateful)
    known: list[tuple[list[int], list[int]]] = []
    for tokens in texts:
        start, points = request(prefixes, tokens, stateful)
        assert start == expected(tokens, known, stateful)
        known.append((tokens, points))
        held = snapshots(prefixes)
        assert prefixes.nbytes == held_bytes(held) == sum(x.nbytes for x in held)


@pytest.mark.parametrize("stateful", [False, True])
@settings(max_examples=40)
@given(
    texts=st.lists(st.tuples(TEXTS, st.integers(0, 1)), min_size=1, max_size=10),
    max_bytes=st.integers(0, 800),
)
def test_the_budget_is_kept_and_what_is_found_is_right(
    stateful: bool, texts: list[tuple[list[int], int]], max_bytes: int
) -> None:
    prefixes, _owners = bound(max_bytes, stateful, count=2)
    for tokens, which in texts:
        request(prefixes, tokens, stateful, which)
        held = snapshots(prefixes)
        assert prefixes.nbytes == held_bytes(held) <= max_bytes
        for tree in prefixes._trees if stateful else []:
            ends = [node for node in tree.nodes() if not node.children]
            assert all(node.states is not None for node in ends)
    prefixes.clear()
    assert prefixes.nbytes == 0 == len(snapshots(prefixes))


ROW = 2 * 2 * 4  # a key and a value of two numbers


def test_leaves_used_longest_ago_go_first() -> None:
    prefixes, _owners = bound(10 * ROW, stateful=False)
    for tokens in ([1, 1, 1, 1], [2, 2, 2, 2]):
        request(prefixes, tokens, stateful=False)
    prefixes.lookup(0, [1, 1, 1])
    request(prefixes, [0, 0, 0], stateful=False)
    assert prefixes.lookup(0, [2, 2]) is None
    found = prefixes.lookup(0, [1, 1, 1, 1, 1])
    assert found is not None
    assert found.stop == 4
    assert prefixes.nbytes == 7 * ROW


def test_what_two_requests_share_is_held_once() -> None:
    prefixes, _owners = bound(1 << 20, stateful=False)
    request(prefixes, [1] * 10 + [0] * 3, stateful=False)
    assert prefixes.nbytes == 13 * ROW
    request(prefixes, [1] * 10 + [2] * 4, stateful=False)
    assert prefixes.nbytes == 17 * ROW


def test_a_text_longer_than_the_budget_is_kept_in_part_or_not() -> None:
    prefixes, _owners = bound(100 * ROW, stateful=True)
    request(prefixes, [1] * 200, stateful=True)
    assert 0 < prefixes.nbytes <= 100 * ROW
    found = prefixes.lookup(0, [1] * 200)
    assert found is not None
    assert found.stop > 20
    prefixes, _owners = bound(3 * ROW, stateful=False)
    request(prefixes, [1] * 4, stateful=False)
    assert prefixes.nbytes == 0


@pytest.mark.usefixtures("exact_buffers")
def points_of(prefixes: PrefixCache, tokens: list[int]) -> Any:
    """Play a request without an end; return its restore points."""
    caches, points = empty(True), prefixes.running_points()
    for stop in range(1, len(tokens) + 1):
        feed(caches, tokens[:stop], stop - 1)
        if stop % EVERY == 0:
            prefixes.take(points, Point(stop, snapshot(caches, stop, stop)))
    return points


def test_restore_points_of_running_streams_are_inside_the_budget() -> None:
    prefixes, _owners = bound(60 * ROW, stateful=True)
    request(prefixes, [1] * 20, stateful=True)
    stored = prefixes.nbytes
    assert stored > 30 * ROW
    one = points_of(prefixes, [2] * 40)
    assert 30 * ROW <= one.nbytes < prefixes.nbytes <= 60 * ROW  # a part had to go
    other = points_of(prefixes, [0] * 80)
    assert snapshots(prefixes) == []
    assert prefixes.nbytes == one.nbytes + other.nbytes <= 60 * ROW
    assert [point.stop for point in one.taken] == list(range(EVERY, 41, EVERY))
    places = [point.stop for point in other.taken]
    assert (places[0], places[-1]) == (EVERY, 80)
    gaps = [two - one for one, two in pairwise(places)]
    assert max(gaps) <= 4 * EVERY
    del one
    gc.collect()
    assert prefixes.nbytes == other.nbytes
    other.taken.clear()
    assert prefixes.nbytes == 0


def test_a_stream_that_is_dropped_while_another_is_stored_changes_nothing() -> None:
    prefixes, _owners = bound(1 << 20, stateful=True)
    inner = points_of(prefixes, [2] * 12)

    class Dropping(list[int]):
        def __getitem__(self, at: Any) -> Any:
            prefixes.store(0, [2] * 12, fed([2] * 12, True), inner)
            return super().__getitem__(at)

    tokens = [1] * 12
    prefixes.store(0, Dropping(tokens), fed(tokens, True), prefixes.running_points())
    assert prefixes.lookup(0, [2] * 12) is None
    found = prefixes.lookup(0, tokens)
    assert found is not None
    assert found.stop == 12
    assert inner.nbytes == 0


@pytest.mark.usefixtures("exact_buffers")
def test_bytes_reported_are_bytes_held() -> None:
    prefixes, _owners = bound(1 << 30, stateful=True)
    for tokens in ([1] * 9, [1] * 5 + [2] * 7, [0] * 6):
        request(prefixes, tokens, stateful=True)
    gc.collect()
    reported, before = prefixes.nbytes, mx.get_active_memory()
    prefixes.clear()
    gc.collect()
    assert before - mx.get_active_memory() == reported > 0


def test_another_pair_of_models_is_refused() -> None:
    prefixes, (owner,) = bound(100, stateful=False)
    prefixes.bind([owner], [empty(False)])
    for others in ([Owner()], [owner, Owner()], []):
        with pytest.raises(InvalidRequestError, match="belongs to Owner"):
            prefixes.bind(others, [empty(False) for _ in others])


def test_caches_of_other_kinds_are_refused() -> None:
    prefixes, owners = bound(100, stateful=True)
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
