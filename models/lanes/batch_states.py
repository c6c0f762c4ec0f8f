"""The hidden states of what a batch has committed, for a head that reads them.

    lane.follower = BatchStates(taps, select)
    ...                                   # rounds of the batch are committed
    unread = lane.follower.held.gathered()
    unread.array, unread.counts           # states of each row, from column 0 on

Every commit of the batch adds the states of the positions that each row has kept, and
a commit that is taken back takes them away again. What rounds add stands side by side
until it is read; then each row's states are moved together, in one operation:

    a round of 3, rows keep 1 and 3       a . . | b c d
    a plain step                          e     | f
    gathered                              a e . . | b c d f       counts 2 and 4

What is held is a value, so to take a commit back is to put the last one in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from mlx_speculation.caches import Keep
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.taps import States

Part = tuple[mx.array, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Unread:
    """States of several rows, those of each in the order of its positions."""

    rows: int = 0  # how many rows
    # Arrays [rows, n, dim], and how many of the n states each row has, from the first
    # one on
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, each: Sequence[mx.array | None]) -> "Unread":
        """Return the states of rows, [1, n, dim] each; None: a row has none."""
        found = cls()
        for array in each:
            held = () if array is None else ((array, (array.shape[1],)),)
            found = found.beside(cls(1, held))
        return found

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many states each row has."""
        each = [counts for _, counts in self.parts]
        return tuple(map(sum, zip(*each, strict=True))) if each else (0,) * self.rows

    @property
    def array(self) -> mx.array:
        """The one array of what was gathered, [rows, n, dim]; n is the most of a row.

        Behind a row's own states there are any.
        """
        ((array, _),) = self.parts
        return array

    @property
    def arrays(self) -> list[mx.array]:
        """All there is, for an evaluation, and for a count of bytes."""
        return [array for array, _ in self.parts]

    def more(self, array: mx.array, counts: Sequence[int]) -> "Unread":
        """Return these states and, behind them, the first `counts[i]` of each row i.

        Args:
            array: [rows, n, dim].
            counts: up to n.
        """
        added = ((array, tuple(counts)),) if any(counts) else ()
        return Unread(self.rows, self.parts + added)

    def gathered(self) -> "Unread":
        """Return the same in one array at most."""
        longest = max(self.counts, default=0)
        if len(self.parts) < 2:
            cut = ((array[:, :longest], counts) for array, counts in self.parts)
            return Unread(self.rows, tuple(cut))
        joined = mx.concatenate(self.arrays, axis=1)
        if joined.shape[1] == longest and len(set(self.counts)) == 1:
            return Unread(self.rows, ((joined, self.counts),))
        places: list[list[int]] = [[] for _ in range(self.rows)]
        begin = 0
        for array, counts in self.parts:
            for row, count in zip(places, counts, strict=True):
                row += range(begin, begin + count)
            begin += array.shape[1]
        return self._picked(joined, places)

    def behind(self, counts: Sequence[int]) -> "Unread":
        """Return what is behind the first `counts[i]` states of each row i."""
        if not any(counts):
            return self
        if tuple(counts) == self.counts:
            return Unread(self.rows)
        held = self.gathered()
        pairs = zip(counts, held.counts, strict=True)
        return self._picked(held.array, [list(range(*pair)) for pair in pairs])

    def last(self) -> mx.array:
        """Return the last state of each row, [rows, 1, dim]; of none, any.

        Legal when it was gathered, and a row has a state.
        """
        places = [max(0, count - 1) for count in self.counts]
        if len(set(places)) == 1:
            return self.array[:, places[0] : places[0] + 1]
        return mx.take_along_axis(self.array, mx.array(places)[:, None, None], axis=1)

    def only(self, rows: Sequence[int]) -> "Unread":
        """Return the states of these rows, in this order."""
        held, places = self.gathered(), mx.array(list(rows))
        cut = (
            (array[places], tuple(counts[row] for row in rows))
            for array, counts in held.parts
        )
        return Unread(len(rows), tuple(cut)) if rows else Unread()

    def beside(self, other: "Unread") -> "Unread":
        """Return the rows of both, those of the other one behind."""
        both = [self.gathered(), other.gathered()]
        counts = self.counts + other.counts
        if not any(counts):
            return Unread(len(counts))
        arrays = [
            _widened(one, like=both[1 - i], columns=max(counts))
            for i, one in enumerate(both)
            if one.rows
        ]
        return Unread(len(counts), ((mx.concatenate(arrays), counts),))

    def _picked(self, array: mx.array, places: list[list[int]]) -> "Unread":
        """Return the states at these columns of each row."""
        counts = tuple(map(len, places))
        width = max(counts)
        index = mx.array([row + [0] * (width - len(row)) for row in places])
        found = mx.take_along_axis(array, index[:, :, None], axis=1)
        return Unread(self.rows, ((found, counts),))


def _widened(one: Unread, like: Unread, columns: int) -> mx.array:
    """Return gathered states with so many columns; zeros where there are none."""
    if not one.parts:
        return mx.zeros((one.rows, columns, like.array.shape[2]), like.array.dtype)
    more = columns - one.array.shape[1]
    return mx.pad(one.array, [(0, 0), (0, more), (0, 0)]) if more else one.array


class BatchStates:
    """What a head has not read yet of the states of a batch.

    Args:
        taps: what sees the states.
        select: picks, or joins, states [rows, positions, dim].

    Attributes:
        held: the states of the rows that are followed, not read yet.
        rows: which requests of the batch these are, set before a round begins.
    """

    def __init__(
        self, taps: HiddenStates, select: Callable[[States], mx.array]
    ) -> None:
        self.taps = taps
        self._select = select
        self.held = Unread()
        self.rows: Sequence[int] = ()

    def added(self, states: States, keep: Keep) -> Unread:
        """Return what will be held once a round is committed.

        Args:
            states: of the round, of all requests of the batch.
            keep: how many positions they keep, or each of them.
        """
        array, rows = self._select(states), self.rows
        if [*rows] != [*range(array.shape[0])]:
            array = array[mx.array([*rows])]
        each = [keep if isinstance(keep, int) else keep[row] for row in rows]
        return self.held.more(array, each)
