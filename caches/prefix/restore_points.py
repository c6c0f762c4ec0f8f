"""The restore points of a stream that still runs, and what it leaves in the end.

They belong to the stream, and count in the budget of the prefix cache that it will
leave them to.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_speculation.caches.snapshots.snapshot import Snapshot


class Point(NamedTuple):
    """A place from which requests can go on."""

    stop: int  # how many tokens
    states: Snapshot  # of the target's layers, after them
    # The target's hidden states of the last of them, which a head reads again,
    # [1, positions, dim]; None: no head follows it
    hidden: mx.array | None = None

    @property
    def size(self) -> int:
        """Bytes of all its arrays, shared or not."""
        return self.states.size + (0 if self.hidden is None else self.hidden.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return self.states.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


class Left(NamedTuple):
    """Caches and restore points that a request leaves of one role."""

    which: int  # the index of the role: of the model in `bind`, or from `bind_head`
    caches: Sequence[Any]  # its live caches
    stop: int  # how many tokens its rows follow from
    # Restore points taken on the way, which are the cache's once stored, or go for lack
    # of room, the last ones first
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
        """Bytes of the states, which no two points share."""
        return sum(point.nbytes for point in self.taken)

    def thin_out(self) -> None:
        """Drop the point that leaves the smallest gap.

        The first and the newest stay: the one needs the fewest rows to be stored, and
        the other is nearest to where the text goes on.
        """
        places = [point.stop for point in self.taken]
        around = zip(places, places[2:], strict=False)
        gaps = [(stop - start, i) for i, (start, stop) in enumerate(around, 1)]
        del self.taken[min(gaps)[1] if gaps else -1]
