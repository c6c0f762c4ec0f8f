"""Snapshots: what a model's caches hold for a range of tokens.

    before = snapshot(caches)                        tokens [0, 40), nothing is copied
    ...                                              the caches go on, to 90
    rest = snapshot(caches, 40)                      tokens [40, 90)
    both = merge(before, rest)                       tokens [0, 90)
    head, tail = split(both, 64)                     tokens [0, 64) and [64, 90)
    restore(head, make_prompt_cache(model))          holds 64 tokens

A model's caches are the unit. KV rows are cut anywhere. Rings, chunks and recurrent
states exist only at the offset where they were taken, the snapshot's `stop`; to cut
a model that has such layers elsewhere, give the states up:

    ranges, states = both.ranges, both.states        rows of [0, 90); states at 90
    head, tail = split(ranges, 64)                   legal, and neither can be restored
    merge(merge(head, tail), states)                 the same as `both`

Bytes are those that a snapshot keeps in memory beyond the live caches. Snapshots
share arrays after a split, a merge or `ranges`; `held_bytes` counts them once.
A snapshot of rows that are still shared with live caches belongs to the thread that
writes these; `copied()` makes one that belongs to nobody.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.held_rows import Rows, buffers, native_type
from mlx_speculation.caches.holding import (
    HOLDINGS,
    Fields,
    Holding,
    aliased,
    arrays_of,
    copied,
    row_fields,
    with_room,
)
from mlx_speculation.caches.kinds import leaves, position
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError


@dataclass(frozen=True, slots=True, eq=False)
class HeldLeaf:
    """What a snapshot holds of one leaf.

    Attributes:
        place: where the leaf stands, such as `2` or `2.0`.
        kind: mlx-lm's class of it.
        settings: what a target must have in common with it.
        rows: the ranges of its rows, in order. None in a layer that the model does
            not use, and in kinds that are held whole.
        state: the fields of a whole state, if there is one.
    """

    place: str
    kind: type
    settings: tuple[Any, ...]
    rows: tuple[Rows, ...] = ()
    state: Fields | None = None

    @property
    def whole(self) -> bool:
        """Whether it is held as a state, not as rows."""
        return HOLDINGS[self.kind].whole

    def buffers(self) -> list[mx.array]:
        """Return the arrays that this object keeps in memory."""
        kept = [array for rows in self.rows for array in rows.buffers()]
        return kept + arrays_of(self.state)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What the caches of one model hold for the tokens [start, stop).

    Attributes:
        start: the first position.
        stop: the position after the last; states are those after this many tokens.
        leaves: one item for every leaf cache.
    """

    start: int
    stop: int
    leaves: tuple[HeldLeaf, ...]

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory beyond what live caches hold anyway."""
        return held_bytes([self])

    @property
    def size(self) -> int:
        """Bytes of what it holds, shared or not: those of a copy."""
        slices = (
            x for leaf in self.leaves for rows in leaf.rows for x in rows.slices()
        )
        states = (x for leaf in self.leaves for x in arrays_of(leaf.state))
        return sum(x.nbytes for x in (*slices, *states))

    @property
    def stateless(self) -> HeldLeaf | None:
        """The first layer whose state at `stop` is missing; None: there is none."""
        missing = (leaf for leaf in self.leaves if leaf.whole and leaf.state is None)
        return next(missing, None)

    @property
    def ranges(self) -> "Snapshot":
        """The rows without the states. It can be cut anywhere."""
        return replace(self, leaves=tuple(replace(x, state=None) for x in self.leaves))

    @property
    def states(self) -> "Snapshot":
        """The states without the rows, for the empty range at `stop`."""
        bare = tuple(replace(leaf, rows=()) for leaf in self.leaves)
        return Snapshot(self.stop, self.stop, bare)

    def copied(self) -> "Snapshot":
        """Return one whose rows stand in arrays of exactly their size, its own.

        States are shared with this one, whose they already are.
        """
        return replace(self, leaves=tuple(_with_own_rows(x) for x in self.leaves))


def held_bytes(snapshots: Iterable[Snapshot]) -> int:
    """Return the bytes that the snapshots keep in memory, shared ones counted once."""
    arrays = {
        id(array): array.nbytes
        for one in snapshots
        for leaf in one.leaves
        for array in leaf.buffers()
    }
    return sum(arrays.values())


def snapshot(
    caches: Sequence[Any], start: int = 0, stop: int | None = None
) -> Snapshot:
    """Take what the caches hold for the tokens [start, stop).

    Args:
        caches: mlx-lm caches, one per layer as `make_prompt_cache` returns them.
        start: the first token; earlier rows are left out.
        stop: how many tokens the caches hold. It is needed where no cache knows
            (models of recurrent layers only), and may be less where all can be cut.

    Raises:
        UnsupportedCacheError: a cache is of a kind that cannot be held, or cannot be
            cut at `stop`.
        InvalidRequestError: the range is not in the caches, or they are out of step.
    """
    found = _supported(caches)
    held = position(caches)
    if stop is None:
        stop = held
    if stop is None:
        raise InvalidRequestError(
            "No cache knows how many tokens it holds, and stop is None. Pass the "
            "number of tokens that the caches were fed."
        )
    if not 0 <= start <= stop or (held is not None and stop > held):
        raise InvalidRequestError(
            f"The range [{start}, {stop}) was asked for, and the caches hold "
            f"[0, {stop if held is None else held}). Ask for a part of that."
        )
    for place, leaf, _ in found:
        _check_offset(place, leaf, held, stop)
    taken = tuple(_taken(*one, start, stop) for one in found)
    mx.eval([leaf.state for leaf in taken])
    return Snapshot(start, stop, taken)


def restore(held: Snapshot, target: Sequence[Any]) -> None:
    """Let the caches hold [0, stop) of a snapshot, in place of what they hold.

    A snapshot that begins at `start` goes on from caches that hold `start` tokens.
    Everything is checked and built before the first cache changes. Price: one copy of
    the rows, with room for more.

    Raises:
        InvalidRequestError: the caches are not those of the same model, or do not
            hold `start` tokens.
        UnsupportedCacheError: a layer's state is missing.
    """
    found = _supported(target)
    if held.stateless is not None:
        leaf = held.stateless
        raise UnsupportedCacheError(
            f"Layer {leaf.place} is a {leaf.kind.__name__}, and this snapshot of "
            f"[{held.start}, {held.stop}) has no state of it. Restore at an offset "
            "where one was taken."
        )
    _check_same([_bare(*one) for one in found], held.leaves)
    if held.start:
        _check_continues(target, held)
    pairs = list(zip(found, held.leaves, strict=True))
    fields = [_restored(cache, leaf, held.start) for (_, cache, _), leaf in pairs]
    mx.eval(fields)
    before = [dict(vars(cache)) for _, cache, _ in found]
    try:
        for (_, cache, _), values in zip(found, fields, strict=True):
            vars(cache).update(values)
    except BaseException:
        for (_, cache, _), values in zip(found, before, strict=True):
            vars(cache).update(values)
        raise


def merge(parent: Snapshot, child: Snapshot) -> Snapshot:
    """Join [a, b) and [b, c) to [a, c), without a copy.

    The states are the child's; the parent's where the child is the empty range [b, b)
    and has none.

    Raises:
        InvalidRequestError: they do not adjoin, or are of different models.
    """
    if parent.stop != child.start:
        raise InvalidRequestError(
            f"The parent ends at {parent.stop} and the child begins at {child.start}. "
            "Pass snapshots that adjoin."
        )
    _check_same(parent.leaves, child.leaves)
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


def split(held: Snapshot, at: int) -> tuple[Snapshot, Snapshot]:
    """Cut [a, c) to [a, at) and [at, c), without a copy. `merge` is the inverse.

    States stay with the part that ends where they were taken; at `stop` itself that
    is the first one.

    Raises:
        UnsupportedCacheError: a layer's state cannot be cut there.
        InvalidRequestError: `at` is outside of the range.
    """
    if not held.start <= at <= held.stop:
        raise InvalidRequestError(
            f"The cut is at {at}, and the snapshot holds [{held.start}, {held.stop}). "
            "Cut inside of it."
        )
    state = next((leaf for leaf in held.leaves if leaf.state is not None), None)
    if state is not None and held.start < at < held.stop:
        raise UnsupportedCacheError(
            f"Layer {state.place} is a {state.kind.__name__}, which can be cut at "
            f"{held.stop} only, where it was taken, and not at {at}. Cut there, or "
            "cut the snapshot's `ranges`."
        )
    parts = (held.start, at), (at, held.stop)
    with_states = at == held.stop, at < held.stop
    head, tail = (
        Snapshot(*part, tuple(_cut(leaf, *part, states) for leaf in held.leaves))
        for part, states in zip(parts, with_states, strict=True)
    )
    return head, tail


def _supported(caches: Sequence[Any]) -> list[tuple[str, Any, Holding]]:
    """Return every leaf with its place and how it is held; refuse unknown kinds."""
    found = [(place, leaf, native_type(leaf)) for place, leaf in leaves(caches)]
    for place, _, kind in found:
        if kind not in HOLDINGS:
            known = ", ".join(known.__name__ for known in HOLDINGS)
            raise UnsupportedCacheError(
                f"The cache of layer {place} is a {kind.__name__}, and the kinds that "
                f"a snapshot can hold are {known}. Take one row out of a batch cache "
                "with its extract(row) first."
            )
    if not found or len({id(leaf) for _, leaf, _ in found}) != len(found):
        raise InvalidRequestError(
            f"The list of caches has {len(found)} leaves, and at least 1 is needed, "
            "each an object of its own. Pass what make_prompt_cache(model) returns."
        )
    return [(place, leaf, HOLDINGS[kind]) for place, leaf, kind in found]


def _check_offset(place: str, leaf: Any, held: int | None, stop: int) -> None:
    """Refuse a leaf that does not hold `stop` tokens and cannot be cut there."""
    kind = native_type(leaf)
    offset = getattr(leaf, "offset", held)
    if offset == 0 and leaf.empty():
        return  # the model does not use this layer, or nothing was fed
    if HOLDINGS[kind].whole and offset is not None and offset != stop:
        raise UnsupportedCacheError(
            f"Layer {place} is a {kind.__name__}, which can be cut at {offset} only, "
            f"where it stands, and not at {stop}. Take the snapshot there."
        )
    if offset is not None and held is not None and offset != held:
        raise InvalidRequestError(
            f"Layer {place} holds {offset} tokens, and another {held}. The layers of "
            "a model move together: pass caches that were fed the same tokens."
        )


def _bare(place: str, leaf: Any, holding: Holding) -> HeldLeaf:
    return HeldLeaf(place, native_type(leaf), holding.settings(leaf))


def _taken(place: str, leaf: Any, holding: Holding, start: int, stop: int) -> HeldLeaf:
    bare = _bare(place, leaf, holding)
    if holding.state is not None:
        return replace(bare, state=copied(holding.state(leaf)))
    if start == stop or leaf.offset == 0:
        return bare
    return replace(bare, rows=(Rows(buffers(leaf), 0, start, stop, leaf),))


def _with_own_rows(leaf: HeldLeaf) -> HeldLeaf:
    if not leaf.rows:
        return leaf
    parts = [rows.slices() for rows in leaf.rows]
    parts.append(tuple(array[..., :0, :] for array in parts[0]))
    arrays = tuple(mx.concatenate([*x], axis=-2) for x in zip(*parts, strict=True))
    mx.eval(arrays)
    start, stop = leaf.rows[0].start, leaf.rows[-1].stop
    return replace(leaf, rows=(Rows(arrays, start, start, stop),))


def _cut(leaf: HeldLeaf, start: int, stop: int, with_state: bool) -> HeldLeaf:
    """Return the part of a leaf in [start, stop); its ranges need no cut at ends."""
    parts = []
    for rows in leaf.rows:
        low, high = max(rows.start, start), min(rows.stop, stop)
        if (low, high) == (rows.start, rows.stop):
            parts.append(rows)
        elif low < high:
            parts.append(rows.cut(low, high))
    return replace(leaf, rows=tuple(parts), state=leaf.state if with_state else None)


def _check_same(some: Sequence[HeldLeaf], others: Sequence[HeldLeaf]) -> None:
    if len(some) != len(others):
        raise InvalidRequestError(
            f"One side has {len(some)} leaf caches and the other {len(others)}. "
            "Snapshots fit the caches of the model that they were taken of."
        )
    for one, other in zip(some, others, strict=True):
        mine = one.place, one.kind.__name__, one.settings
        if mine != (other.place, other.kind.__name__, other.settings):
            raise InvalidRequestError(
                f"Layer {one.place} is a {one.kind.__name__} with {one.settings} on "
                f"one side, and layer {other.place} a {other.kind.__name__} with "
                f"{other.settings} on the other. Snapshots fit the caches of the model "
                "that they were taken of."
            )


def _check_continues(target: Sequence[Any], held: Snapshot) -> None:
    """Refuse a target that does not hold the tokens before the snapshot's."""
    offset = position(target)
    if offset is not None and offset != held.start:
        raise InvalidRequestError(
            f"The caches hold {offset} tokens, and the snapshot of "
            f"[{held.start}, {held.stop}) goes on from {held.start}. Restore what is "
            "before it first, or merge the two."
        )


def _restored(cache: Any, leaf: HeldLeaf, start: int) -> Fields:
    """Return the fields that let a cache hold what a leaf held."""
    if leaf.whole:
        return aliased(leaf.state)  # type: ignore[no-any-return]
    if not leaf.rows:
        kept = buffers(cache)
        return {} if start and kept else row_fields(cache, (), 0)
    parts = [tuple(array[..., :start, :] for array in buffers(cache))] if start else []
    parts += [rows.slices() for rows in leaf.rows]
    stop = leaf.rows[-1].stop
    return row_fields(cache, with_room(cache, parts, stop), stop)
