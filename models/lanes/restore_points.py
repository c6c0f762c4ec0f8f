"""The states of a lane that are taken on the way, for later requests.

Layers without rows can be resumed only where their states were taken. So while a
prompt is fed, and between rounds, a snapshot of the states is taken at most every
`every` tokens: in a prompt at its multiples, where other prompts have theirs too, and
at the places where later ones are likely to part from it.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import mlx.core as mx

from mlx_speculation.caches import Point, PrefixCache, snapshot


class HasCaches(Protocol):
    """Part of a lane that is needed here."""

    caches: list[Any]
    seen: int


class RestorePoints:
    """Restore points of one lane.

    Args:
        cache: they are at most its `every` tokens apart, and inside its budget.
        places: further ones of the prompt, in tokens from its beginning.

    Attributes:
        hidden: returns the last hidden states, where a head reads them again.
    """

    def __init__(self, cache: PrefixCache, places: Iterable[int] = ()) -> None:
        self._cache, self._every = cache, cache.every
        self._places = sorted(places)
        self._last = 0
        self.hidden: Callable[[], mx.array | None] = lambda: None
        self.running = cache.running_points()

    def next_chunk(self, lane: HasCaches, step: int) -> int:
        """Return how many tokens to feed before the next one is due, at most `step`."""
        later = (place - lane.seen for place in self._places if place > lane.seen)
        return min(step, self._every - lane.seen % self._every, next(later, step))

    def take(self, lane: HasCaches) -> None:
        """Take one where the lane stands. All its tokens have to be committed."""
        point = snapshot(lane.caches, lane.seen, lane.seen)
        self._cache.take(self.running, Point(lane.seen, point, self.hidden()))
        self._last = lane.seen

    def due(self, seen: int, reach: int) -> bool:
        """Return whether a round of at most `reach` tokens could pass a place for one.

        One that was passed all the same, by a prompt for instance, is due now.
        """
        return seen + reach - self._last > self._every and seen > self._last

    def resumed(self, seen: int) -> None:
        """Count from a restore point that was there before."""
        self._last = seen
