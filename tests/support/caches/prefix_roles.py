"""Requests to a prefix cache, for several roles; rows of caches identify their text.

A role is a target, a draft model or a head. Row m of its caches depends on the tokens
[0, m + lag]. It holds the position m + 1, and a digest of the lag and of these tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_speculation.caches import Left, Point, PrefixCache, restore, snapshot
from mlx_speculation.caches.snapshots.snapshot import Snapshot
from support.caches.cache_twins import assert_same, read

EVERY = 4
ROW = 2 * 2 * 4  # bytes of a key and a value of two numbers


class Owner(nn.Module):
    """A substitute for a model, without weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of a role: the caches of the role, and its lag."""

    stateful: bool = False  # whether the role has a ring beside its KV cache
    lag: int = 0  # row m depends on the tokens [0, m + lag]

    def empty(self) -> list[Any]:
        return [KVCache(), *([RotatingKVCache(max_size=3)] if self.stateful else [])]

    def feed(self, caches: list[Any], tokens: Sequence[int], start: int) -> None:
        for stop in range(start + 1, len(tokens) - self.lag + 1):
            digest = hash((*tokens[: stop + self.lag], self.lag)) % 99991
            rows = mx.array([[[[float(stop), float(digest)]]]])
            for cache in caches:
                cache.update_and_fetch(rows, -rows)

    def fed(self, tokens: Sequence[int]) -> list[Any]:
        caches = self.empty()
        self.feed(caches, tokens, 0)
        return caches


ROWS, RING = Kind(), Kind(stateful=True)


def content(caches: list[Any]) -> Any:
    """Return the rows of caches in the order of positions."""
    views: list[Any] = []
    for cache in caches:
        views.append(cache.offset)
        if not cache.empty():
            keys, values = cache.keys_and_values()
            order = mx.argsort(keys[0, 0, :, 0])
            views += [keys[:, :, order], values[:, :, order]]
    return read(views)


def bound(
    max_bytes: int, *kinds: Kind, **options: Any
) -> tuple[PrefixCache, list[Owner]]:
    """Return a prefix cache and owners for roles; a role with a lag is a head."""
    prefixes = PrefixCache(max_bytes, every=EVERY, **options)
    owners = [Owner() for _ in kinds]
    models = [kind.lag == 0 for kind in kinds].count(True)
    prefixes.bind(owners[:models], [kind.empty() for kind in kinds[:models]])
    for number, kind in enumerate(kinds[models:], models):
        assert prefixes.bind_head(owners[number], kind.empty(), kind.lag) == number
    return prefixes, owners


def snapshots(prefixes: PrefixCache) -> list[Snapshot]:
    nodes = list(prefixes._tree.nodes())
    points = [point for node in nodes for point in node.points.values()]
    rows = [rows for node in nodes for rows in node.rows.values()]
    return [*rows, *(point.states for point in points)]


def request(
    prefixes: PrefixCache, tokens: list[int], roles: dict[int, tuple[Kind, int]]
) -> dict[int, tuple[int, list[int]]]:
    """Play a request, and return two results for each role.

    They are how many tokens were reused, and after how many tokens the role can be
    resumed later. `roles` has the kind of each role, and how many last tokens its
    caches lack. All tokens but the last are looked up. Restore points for which the
    prefix cache has no memory are dropped.
    """
    left: list[Left] = []
    running: list[Any] = []
    played: dict[int, tuple[int, list[int]]] = {}
    prefixes.fetch(tokens[:-1])
    for which, (kind, left_out) in roles.items():
        caches, first = kind.empty(), 0
        reused = prefixes.lookup(which, tokens[:-1])
        if reused is not None:
            first = reused.stop
            restore(reused, caches)
            wanted = content(kind.fed(tokens[: first + kind.lag]))
            assert_same(content(caches), wanted, f"what role {which} found")
        stop = max(len(tokens) - left_out, first + kind.lag)
        points = prefixes.running_points()
        for row in range(first, stop - kind.lag):
            kind.feed(caches, tokens[: row + 1 + kind.lag], row)
            if kind.stateful and (row + 1) % EVERY == 0 and row + 1 < stop:
                point = Point(row + 1, snapshot(caches, row + 1, row + 1))
                prefixes.take(points, point)
                assert prefixes.nbytes <= prefixes.max_bytes
        left.append(Left(which, caches, stop, points.taken))
        places = [*(point.stop for point in points.taken), stop]
        if not kind.stateful:
            places = [*range(1, stop + 1)]
        places = [place for place in places if 0 < place <= left[0].stop]
        played[which] = (first + kind.lag if first else 0, places)
        running.append(points)
    waiting = sum(points.nbytes for points in running)
    assert prefixes.nbytes == waiting + sum(x.nbytes for x in snapshots(prefixes))
    prefixes.store(tokens[: left[0].stop], left)
    assert not any(points.nbytes for points in running)
    return played
