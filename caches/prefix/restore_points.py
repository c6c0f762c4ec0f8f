"""The restore points of a stream that still runs.

They belong to the stream, and count in the budget of the prefix cache that it will
leave them to.
"""

from collections.abc import Iterator

from mlx_speculation.caches.snapshots.snapshot import Snapshot

Point = tuple[int, Snapshot]  # how many tokens, and the states after them


class RunningPoints:
    """The restore points of one running stream; they count in the cache's budget.

    Attributes:
        taken: how many tokens, and the states after them, in order.
    """

    def __init__(self) -> None:
        self.taken: list[Point] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the states, which no two points share."""
        return sum(states.nbytes for _, states in self.taken)

    def thin_out(self) -> None:
        """Drop the point that leaves the smallest gap.

        The first and the newest stay: the one needs the fewest rows to be stored, and
        the other is nearest to where the text goes on.
        """
        places = [place for place, _ in self.taken]
        gaps = [(stop - start, i) for i, (start, stop) in enumerate(_ends(places), 1)]
        del self.taken[min(gaps)[1] if gaps else -1]


def _ends(places: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the neighbours of every place but the first and the last."""
    return zip(places, places[2:], strict=False)
