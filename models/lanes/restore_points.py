"""Restore points: snapshots of the recurrent states of a lane, for later requests.

A recurrent layer can be resumed only at a position where its state was saved. So the
states are saved at least once in every `cache.every` tokens. In a prompt this happens
at multiples of this number, so that other prompts share the points, and at places where
later prompts are likely to differ.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.caches import Point, PrefixCache, snapshot


class RestorePoints:
    """Restore points of one lane, which count towards the budget of `cache`.

    `places` are further positions at which to save, in tokens from the prompt's
    beginning.

    Attributes:
        hidden: returns the last hidden states if a head needs them to resume, else
            None.
        running: the points that this lane has taken.
    """

    def __init__(self, cache: PrefixCache, places: Iterable[int] = ()) -> None:
        self._cache, self._every = cache, cache.every
        self._places = sorted(places)
        self._last = 0
        self.hidden: Callable[[], mx.array | None] = lambda: None
        self.running = cache.running_points()

    def next_chunk(self, seen: int, step: int) -> int:
        """Return how many tokens to feed up to the next point, at most `step`."""
        later = (place - seen for place in self._places if place > seen)
        return min(step, self._every - seen % self._every, next(later, step))

    def take(self, caches: Sequence[Any], seen: int) -> None:
        """Save the states after `seen` committed tokens."""
        point = snapshot(caches, seen, seen)
        self._cache.take(self.running, Point(seen, point, self.hidden()))
        self._last = seen

    def due(self, seen: int, reach: int) -> bool:
        """Return whether a point has to be taken before a round of `reach` tokens."""
        return seen + reach - self._last > self._every and seen > self._last

    def resumed(self, seen: int) -> None:
        """Note that the lane was resumed at a restore point, after `seen` tokens."""
        self._last = seen
