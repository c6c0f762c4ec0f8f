"""The restore points of a running stream, and the caches stored at the stream's end.

A role is the target, a draft model or a head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_speculation.caches.snapshots.snapshot import Snapshot


class Point(NamedTuple):
    """States of a role's layers after `stop` tokens, to resume the role from."""

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
    caches: Sequence[Any]  # the role's live caches
    stop: int  # `caches` hold what the role computed from the first `stop` tokens
    # Restore points taken during the request. The prefix cache stores them; without
    # room, it drops the last ones first.
    points: list[Point]
    hidden: mx.array | None = None  # as in `Point`, for the first `stop` tokens


class RunningPoints:
    """The restore points of one running stream; `PrefixCache` counts their bytes."""

    def __init__(self) -> None:
        self.taken: list[Point] = []  # in order of `stop`

    @property
    def nbytes(self) -> int:
        """Bytes of the points, which share no arrays."""
        return sum(point.nbytes for point in self.taken)

    def thin_out(self) -> None:
        """Drop the point that leaves the smallest gap, but not the first or the newest.

        The first point needs the fewest stored KV rows, and the newest is nearest to
        the end of the text. Of fewer than three, the newest is dropped.
        """
        places = [point.stop for point in self.taken]
        around = zip(places, places[2:], strict=False)
        gaps = [(stop - start, i) for i, (start, stop) in enumerate(around, 1)]
        del self.taken[min(gaps)[1] if gaps else -1]
