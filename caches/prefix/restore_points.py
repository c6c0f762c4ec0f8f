"""The restore points of a running stream, and the caches stored at the stream's end.

The points belong to the stream. They count in the budget of the prefix cache, which
will store them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_speculation.caches.snapshots.snapshot import Snapshot


class Point(NamedTuple):
    """States of a role's layers after `stop` tokens, from which to resume the role."""

    stop: int  # the number of tokens
    states: Snapshot  # of the role's layers, after these tokens
    # The target's hidden states [1, positions, dim] at the last few of these tokens; a
    # head reads them again. None: no head reads them
    hidden: mx.array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return self.states.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


class Left(NamedTuple):
    """Caches and restore points of one role at the end of a request."""

    # The index of the role: the model's place in the list passed to `PrefixCache.bind`,
    # or the result of `PrefixCache.bind_head`
    which: int
    caches: Sequence[Any]  # its live caches
    stop: int  # the role's rows are computed from the first `stop` tokens
    # Restore points taken on the way. The prefix cache stores them; without room, it
    # drops the last ones first.
    points: list[Point]
    hidden: mx.array | None = None  # the target's last states, if a head reads them


class RunningPoints:
    """The restore points of one running stream; they count in the cache's budget.

    Attributes:
        taken: the points, in order.
    """

    def __init__(self) -> None:
        self.taken: list[Point] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the points, which share no arrays."""
        return sum(point.nbytes for point in self.taken)

    def thin_out(self) -> None:
        """Drop the point that leaves the smallest gap, but not the first or the newest.

        The first point needs the fewest KV rows stored: those before it. The newest is
        nearest to the end of the text. With fewer than three points, the newest goes.
        """
        places = [point.stop for point in self.taken]
        around = zip(places, places[2:], strict=False)
        gaps = [(stop - start, i) for i, (start, stop) in enumerate(around, 1)]
        del self.taken[min(gaps)[1] if gaps else -1]
