"""Snapshots: the contents of a model's caches for a range of tokens.

    before = snapshot(caches)                        tokens [0, 40)
    ...                                              the model reads on, to 90
    rest = snapshot(caches, 40)                      tokens [40, 90)
    both = merge(before, rest)                       tokens [0, 90)
    head, tail = split(both, 64)                     tokens [0, 64) and [64, 90)
    restore(head, make_prompt_cache(model))          new caches with 64 tokens

KV rows can be cut anywhere. Rotating, chunked and batch caches and recurrent states are
kept as they were at the snapshot's `stop`, and cannot be cut. To cut a snapshot with
such layers, separate the states:

    ranges, states = both.ranges, both.states        rows of [0, 90); states at 90
    head, tail = split(ranges, 64)                   legal; neither can be restored
    merge(merge(head, tail), states)                 the same as `both`

KV rows are views, so taking them copies nothing. While a view lives, the next write to
its cache copies the whole buffer. A `copied()` snapshot has rows of its own, and can be
used in any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_speculation.caches.snapshots.per_kind import HOLDINGS, Fields, arrays_of
from mlx_speculation.caches.types.buffers import Arrays
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError


class Rows(NamedTuple):
    """Rows [start, stop) of one cache, by position."""

    start: int
    stop: int
    arrays: Arrays  # with these rows only, on axis -2

    def cut(self, start: int, stop: int) -> "Rows":
        """Return a view of the rows [start, stop)."""
        rows = slice(start - self.start, stop - self.start)
        return Rows(start, stop, tuple(array[..., rows, :] for array in self.arrays))


@dataclass(frozen=True, slots=True, eq=False)
class HeldLeaf:
    """Snapshot of one leaf cache (any cache but a `CacheList`)."""

    place: str  # the leaf's place in the list of caches: `2`, or `2.0` in a `CacheList`
    kind: type  # the leaf's class
    settings: tuple[Any, ...]  # must equal those of the cache that is restored
    # The ranges of the leaf's rows, in order; empty for a layer that the model does not
    # use, and for kinds saved as a state.
    rows: tuple[Rows, ...] = ()
    state: Fields | None = None  # the fields of a whole state; None: there is none

    @property
    def whole(self) -> bool:
        """Return whether the leaf's kind is saved as a state, not as rows."""
        return HOLDINGS[self.kind].whole

    def arrays(self) -> list[mx.array]:
        """Return the arrays of the leaf's rows and state."""
        return [x for rows in self.rows for x in rows.arrays] + arrays_of(self.state)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Snapshot of one model's caches for the tokens [start, stop)."""

    start: int  # the first position
    stop: int  # the position after the last; the states are taken there
    leaves: tuple[HeldLeaf, ...]  # one item for every leaf cache

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and states: the bytes of a copy."""
        return sum(x.nbytes for leaf in self.leaves for x in leaf.arrays())

    @property
    def stateless(self) -> HeldLeaf | None:
        """The first layer that lacks its state at `stop`; None: no layer lacks it."""
        missing = (leaf for leaf in self.leaves if leaf.whole and leaf.state is None)
        return next(missing, None)

    @property
    def ranges(self) -> "Snapshot":
        """A snapshot of the rows without the states; it can be cut anywhere."""
        return replace(self, leaves=tuple(replace(x, state=None) for x in self.leaves))

    @property
    def states(self) -> "Snapshot":
        """A snapshot of the states without the rows, for the empty range at `stop`."""
        bare = tuple(replace(leaf, rows=()) for leaf in self.leaves)
        return Snapshot(self.stop, self.stop, bare)

    def copied(self) -> "Snapshot":
        """Return a snapshot with its own copies of the rows; it shares the states."""
        return replace(self, leaves=tuple(_with_own_rows(x) for x in self.leaves))


def merge(parent: Snapshot, child: Snapshot) -> Snapshot:
    """Join [a, b) and [b, c) to [a, c), without a copy.

    The states are those of the child. If the child is the empty range [b, b), a state
    that the child lacks is taken from the parent.

    Raises:
        InvalidRequestError: the two do not adjoin, or are of different models.
    """
    if parent.stop != child.start:
        raise InvalidRequestError(
            f"The parent ends at {parent.stop} and the child begins at {child.start}. "
            "Pass snapshots that adjoin."
        )
    check_same(parent.leaves, child.leaves)
    empty = child.start == child.stop
    joined = tuple(
        replace(
            one,
            rows=one.rows + other.rows,
            state=one.state if empty and other.state is None else other.state,
        )
        for one, other in zip(parent.leaves, child.leaves, strict=True)
    )
    return Snapshot(parent.start, child.stop, joined)


def split(whole: Snapshot, at: int) -> tuple[Snapshot, Snapshot]:
    """Cut [a, c) to [a, at) and [at, c), without a copy. `merge` is the inverse.

    States stay with the part that ends where they were taken. With `at` equal to
    `stop`, that is the first part.

    Raises:
        UnsupportedCacheError: a layer's state cannot be cut there.
        InvalidRequestError: `at` is outside of the range.
    """
    if not whole.start <= at <= whole.stop:
        raise InvalidRequestError(
            f"The cut is at {at}, but the snapshot holds "
            f"[{whole.start}, {whole.stop}). Cut inside of it."
        )
    state = next((leaf for leaf in whole.leaves if leaf.state is not None), None)
    if state is not None and whole.start < at < whole.stop:
        raise UnsupportedCacheError(
            f"Layer {state.place} is a {state.kind.__name__}, which can be cut only at "
            f"{whole.stop}, where the snapshot was taken, not at {at}. Cut there, or "
            "cut the snapshot's `ranges`."
        )
    parts = (whole.start, at), (at, whole.stop)
    with_states = at == whole.stop, at < whole.stop
    head, tail = (
        replace(
            whole,
            start=part[0],
            stop=part[1],
            leaves=tuple(_cut(leaf, *part, states) for leaf in whole.leaves),
        )
        for part, states in zip(parts, with_states, strict=True)
    )
    return head, tail


def _cut(leaf: HeldLeaf, start: int, stop: int, with_state: bool) -> HeldLeaf:
    parts = []
    for rows in leaf.rows:
        low, high = max(rows.start, start), min(rows.stop, stop)
        if (low, high) == (rows.start, rows.stop):
            parts.append(rows)
        elif low < high:
            parts.append(rows.cut(low, high))
    return replace(leaf, rows=tuple(parts), state=leaf.state if with_state else None)


def _with_own_rows(leaf: HeldLeaf) -> HeldLeaf:
    if not leaf.rows:
        return leaf
    parts = [rows.arrays for rows in leaf.rows]
    parts.append(tuple(array[..., :0, :] for array in parts[0]))  # forces a copy
    arrays = tuple(mx.concatenate([*x], axis=-2) for x in zip(*parts, strict=True))
    mx.eval(arrays)
    return replace(leaf, rows=(Rows(leaf.rows[0].start, leaf.rows[-1].stop, arrays),))


def check_same(some: Sequence[HeldLeaf], others: Sequence[HeldLeaf]) -> None:
    """Raise InvalidRequestError if the leaves are of different models."""
    if len(some) != len(others):
        raise InvalidRequestError(
            f"One side has {len(some)} leaf caches and the other {len(others)}. "
            "Use snapshots only with caches of the model that they were taken from."
        )
    for one, other in zip(some, others, strict=True):
        mine = one.place, one.kind.__name__, one.settings
        if mine != (other.place, other.kind.__name__, other.settings):
            raise InvalidRequestError(
                f"Layer {one.place} is a {one.kind.__name__} with {one.settings} on "
                f"one side, and layer {other.place} a {other.kind.__name__} with "
                f"{other.settings} on the other. Use snapshots only with caches of the "
                "model that they were taken from."
            )
