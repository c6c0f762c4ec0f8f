"""The states of a lane that are taken on the way, for later requests.

Layers without rows can be resumed only where their states were taken. So while a
prompt is fed, and between rounds, a snapshot of the states is taken at most every
`every` tokens: in a prompt at its multiples, where other prompts have theirs too.
"""

from typing import Any, Protocol

from mlx_speculation.caches import Snapshot, snapshot


class HasCaches(Protocol):
    """What is needed of a lane."""

    caches: list[Any]
    seen: int


class RestorePoints:
    """Restore points of one lane.

    Args:
        every: how many tokens they are apart at most.
        max_bytes: how much they may hold together; the first ones go first.
    """

    def __init__(self, every: int, max_bytes: int) -> None:
        self._every, self._max_bytes = every, max_bytes
        self._last = 0
        self.taken: list[tuple[int, Snapshot]] = []

    def next_chunk(self, lane: HasCaches, step: int) -> int:
        """Return how many tokens to feed before the next one is due, at most `step`."""
        return min(step, self._every - lane.seen % self._every)

    def take(self, lane: HasCaches) -> None:
        """Take one where the lane stands. All its tokens have to be committed."""
        held = snapshot(lane.caches, lane.seen, lane.seen)
        self.taken.append((lane.seen, held))
        self._last = lane.seen
        while sum(states.nbytes for _, states in self.taken) > self._max_bytes:
            del self.taken[0]

    def between_rounds(self, lane: HasCaches, reach: int) -> None:
        """Take one if the next round, of at most `reach` tokens, could pass its place.

        One that was passed all the same, by a prompt for instance, is taken now.
        """
        if lane.seen + reach - self._last > self._every and lane.seen > self._last:
            self.take(lane)

    def resumed(self, seen: int) -> None:
        """Count from a restore point that was there before."""
        self._last = seen
