"""Restore points are as dense as documented, in a prompt and in rounds."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation.caches import PrefixCache
from mlx_speculation.models import RestorePoints

REACH = 3


class Caches:
    """A lane's caches, and the number of tokens that they hold."""

    def __init__(self) -> None:
        self.caches: list[Any] = [RotatingKVCache(max_size=4)]
        self.seen = 0

    def feed(self, rows: int) -> None:
        block = mx.ones((1, 1, rows, 2))
        self.caches[0].update_and_fetch(block, block)
        self.seen += rows


@given(
    every=st.integers(REACH, 9),
    prompt=st.integers(0, 30),
    rounds=st.lists(st.integers(1, REACH), max_size=20),
)
def test_no_two_points_are_further_apart_than_said(
    every: int, prompt: int, rounds: list[int]
) -> None:
    lane, points = Caches(), RestorePoints(PrefixCache(1 << 30, every=every))
    while lane.seen < prompt:
        lane.feed(min(points.next_chunk(lane.seen, 12), prompt - lane.seen))
        points.take(lane.caches, lane.seen)
    for width in rounds:
        lane.feed(width)
        if points.due(lane.seen, REACH):
            points.take(lane.caches, lane.seen)
    places = [0, *(point.stop for point in points.running.taken), lane.seen]
    assert places == sorted(places)
    pairs = pairwise(places)
    assert all(stop - start <= every for start, stop in pairs)
    assert set(range(every, prompt + 1, every)) <= set(places)


def test_points_are_thinned_out_where_there_are_too_many_bytes() -> None:
    lane, points = Caches(), RestorePoints(PrefixCache(200, every=1))
    for _ in range(9):
        lane.feed(1)
        points.take(lane.caches, lane.seen)
    assert sum(point.nbytes for point in points.running.taken) <= 200
    assert [point.stop for point in points.running.taken] == [1, 5, 9]
