"""Eviction by a text's last use and by the cost to read it again; memory bounds."""

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_speculation.caches import Left, PrefixCache
from mlx_speculation.environment import free_memory
from support.caches.prefix_roles import (
    EVERY,
    RING,
    ROW,
    ROWS,
    Kind,
    bound,
    request,
    snapshots,
)

LONG = 60
SESSION = [1, 2] * (LONG // 2)


def play(prefixes: PrefixCache, tokens: list[int], kind: Kind = ROWS) -> int:
    """Play a request of the target alone; return the number of reused tokens."""
    return request(prefixes, tokens, {0: (kind, 0)})[0][0]


def stored(prefixes: PrefixCache, tokens: list[int]) -> int:
    """Return how many tokens of a text are held; this does not count as a use."""
    return prefixes._tree.path(tokens)[1]


@pytest.mark.parametrize("kind", [ROWS, RING], ids=["rows", "ring"])
@settings(max_examples=30)
@given(
    sides=st.lists(st.integers(1, 12), max_size=30),
    spare=st.integers(0, 20),
)
def test_side_requests_never_evict_a_session_that_costs_more(
    kind: Kind, sides: list[int], spare: int
) -> None:
    """All side requests together cost less than the session."""
    free, _ = bound(1 << 30, kind)
    play(free, SESSION, kind)
    prefixes, _owners = bound(free.nbytes + spare * ROW, kind)
    play(prefixes, SESSION, kind)
    cost = 0
    for number, length in enumerate(sides):
        cost += length
        if cost >= LONG:
            break
        play(prefixes, [0, *([number % 3] * (length - 1))], kind)
        assert prefixes.nbytes <= prefixes.max_bytes
        assert stored(prefixes, SESSION) == LONG
    assert play(prefixes, [*SESSION, 0], kind) == LONG


@pytest.mark.parametrize("kind", [ROWS, RING], ids=["rows", "ring"])
@pytest.mark.parametrize("spare", [0, 8, 20])
def test_many_side_requests_between_turns_leave_a_session(
    kind: Kind, spare: int
) -> None:
    """From the fourth turn on, 25 side requests of 7 tokens follow each turn.

    Together they have about three times as many tokens as `SESSION`.
    """
    free, _ = bound(1 << 30, kind)
    turns = [[*SESSION, *[0] * (2 * turn)] for turn in range(8)]
    for tokens in turns:
        play(free, tokens, kind)
    prefixes, _owners = bound(free.nbytes + spare * ROW, kind)
    number = known = 0
    for turn, tokens in enumerate(turns):
        assert play(prefixes, tokens, kind) == known
        known = len(tokens)
        for _ in range(3 * LONG // 7 if turn > 2 else 3):
            number += 1
            digits = [number // 3**place % 3 for place in range(6)]
            play(prefixes, [0, *digits], kind)
            assert prefixes.nbytes <= prefixes.max_bytes
    assert number > 100


def test_evictions_are_counted_one_by_one() -> None:
    prefixes, _owners = bound(12 * ROW, ROWS)
    for number in range(3):
        play(prefixes, [number] * 4)
    assert prefixes.evictions == 0
    play(prefixes, [1, 0, 0, 0, 0, 0])  # 5 new rows replace those of two texts
    assert prefixes.evictions == 2
    assert len(list(prefixes._tree.nodes())) == 4


def test_a_session_that_nobody_uses_goes_in_the_end() -> None:
    prefixes, _owners = bound(LONG * ROW, ROWS)
    play(prefixes, SESSION)
    for number in range(40):
        play(prefixes, [0, *[number % 3] * 9])
    assert stored(prefixes, SESSION) < LONG
    assert play(prefixes, [0, *[0] * 9]) > 0


def test_two_sessions_by_turns_keep_what_there_is_room_for() -> None:
    """By the order of use alone, each would evict all rows of the other."""
    prefixes, _owners = bound(LONG * ROW, ROWS)
    other, reused = [2, 1] * (LONG // 2), 0
    for _ in range(6):
        for tokens in (SESSION, other):
            reused += play(prefixes, tokens)
    assert reused > 6 * LONG * 0.7


def test_points_between_turns_go_before_the_ends_of_texts() -> None:
    """Points whose loss costs the least prefill are evicted first, and rows stay."""
    free, _ = bound(1 << 30, RING)
    play(free, SESSION, RING)
    points = [point for node in free._tree.nodes() for point in node.points.values()]
    prefixes, _owners = bound(free.nbytes - 3 * points[0].nbytes, RING)
    play(prefixes, SESSION, RING)
    play(prefixes, [*SESSION, 0, 0], RING)
    assert play(prefixes, [*SESSION, 0, 0, 2], RING) == LONG + 2
    nodes = [node.stop for node in prefixes._tree.nodes() if 0 in node.points]
    gaps = [b - a for a, b in zip([0, *sorted(nodes)], sorted(nodes), strict=False)]
    assert max(gaps) <= 3 * EVERY


def test_the_size_by_default_is_a_share_of_the_free_memory() -> None:
    free = free_memory()
    assert free is not None
    assert free > 10**8
    assert free / 8 < PrefixCache().max_bytes < free / 2


@pytest.mark.usefixtures("exact_buffers")
def test_memory_is_at_most_the_bound_and_a_chunk() -> None:
    """Rows are copied piece by piece, also if requests diverge inside a text."""
    budget, chunk = 40 * ROW, EVERY * ROW
    prefixes, _owners = bound(budget, ROWS)
    texts = [SESSION, SESSION[:30] + [0] * 9, [0] * 50, SESSION[:18] + [0] * 30]
    for tokens in texts * 3:
        caches: Any = ROWS.fed(tokens)
        mx.eval([cache.state for cache in caches])
        gc.collect()
        before = mx.get_active_memory() - prefixes.nbytes
        mx.reset_peak_memory()
        prefixes.store(tokens, [Left(0, caches, len(tokens), [])])
        assert mx.get_peak_memory() - before <= budget + chunk
        assert prefixes.nbytes <= budget
        del caches
        gc.collect()
        assert mx.get_active_memory() - before <= budget


@pytest.mark.usefixtures("exact_buffers")
def test_memory_is_at_most_that_while_files_are_read(tmp_path: Path) -> None:
    budget, chunk = 40 * ROW, EVERY * ROW
    first, _first_owners = bound(1 << 30, ROWS, folder=tmp_path / "own")
    play(first, SESSION)
    first.flush()
    first.clear()
    later, _owners = bound(budget, ROWS, folder=tmp_path / "own")
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    later.fetch(SESSION)
    assert mx.get_peak_memory() - before <= budget + chunk
    assert later.nbytes > budget - chunk


@pytest.mark.usefixtures("exact_buffers")
@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_requests_leave_memory_flat(count: int) -> None:
    prefixes, _owners = bound(100 * ROW, RING)
    seen: list[tuple[int, int]] = []
    for number in range(count):
        digits = [number // 3**place % 3 for place in range(7)]
        play(prefixes, digits + digits[: number % 5], RING)
        if number % 75 == 74:
            gc.collect()
            kept_bytes = sum(each.nbytes for each in snapshots(prefixes))
            assert kept_bytes == prefixes.nbytes
            seen.append((mx.get_active_memory(), len(list(prefixes._tree.nodes()))))
    assert max(memory for memory, _ in seen) - seen[0][0] <= 100 * ROW
    assert max(nodes for _, nodes in seen) <= 100
