"""Taking snapshots of live caches, and restoring them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.snapshots.per_kind import (
    HOLDINGS,
    Fields,
    Holding,
    changed,
    row_fields,
    state_of,
    with_room,
)
from mlx_speculation.caches.snapshots.snapshot import (
    HeldLeaf,
    Rows,
    Snapshot,
    check_same,
)
from mlx_speculation.caches.types.buffers import buffers
from mlx_speculation.caches.types.leaves import assign, checked_leaves, flat
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError


def snapshot(
    caches: Sequence[Any], start: int = 0, stop: int | None = None
) -> Snapshot:
    """Return a snapshot of the caches for the tokens [start, stop).

    `caches` are mlx-lm caches, one per layer as `make_prompt_cache` returns them.
    `stop` is by default the number of tokens that they hold. It has to be passed if all
    layers are recurrent, since these do not know the number. It can be smaller if all
    caches can be cut there.

    Raises:
        UnsupportedCacheError: a snapshot cannot hold a cache of this kind, or the cache
            cannot be cut at `stop`.
        InvalidRequestError: the range is not in the caches, or the caches hold
            different numbers of tokens.
    """
    result = _supported(caches)
    extent = _extent(caches)
    if stop is None:
        stop = extent
    if stop is None:
        raise InvalidRequestError(
            "No cache knows how many tokens it holds, and stop is None. Pass as stop "
            "the number of tokens that were fed to the caches."
        )
    if not 0 <= start <= stop or (extent is not None and stop > extent):
        raise InvalidRequestError(
            f"The requested range [{start}, {stop}) is not in the caches, which hold "
            f"[0, {stop if extent is None else extent}). Request a part of that."
        )
    for place, leaf, _ in result:
        _check_offset(place, leaf, extent, stop)
    taken = tuple(_taken(*one, start, stop) for one in result)
    mx.eval([leaf.state for leaf in taken])
    return Snapshot(start, stop, taken)


def restore(saved: Snapshot, target: Sequence[Any]) -> None:
    """Replace the contents of caches by those of a snapshot of the same model.

    If the snapshot's `start` is above 0, the caches have to hold exactly the first
    `start` tokens, which stay. Everything is checked and built before the first cache
    changes. The rows are copied once, into buffers with room for more.

    Raises:
        InvalidRequestError: the caches are those of another model, or do not hold
            `start` tokens.
        UnsupportedCacheError: the snapshot lacks the state of a recurrent layer.
    """
    result = _supported(target)
    if saved.stateless is not None:
        leaf = saved.stateless
        raise UnsupportedCacheError(
            f"Layer {leaf.place} is a {leaf.kind.__name__}, but this snapshot of "
            f"[{saved.start}, {saved.stop}) has no state for it. Restore a snapshot "
            "that ends where a state was taken."
        )
    check_same([_bare(*one) for one in result], saved.leaves)
    if saved.start:
        _check_continues(target, saved)
    pairs = list(zip(result, saved.leaves, strict=True))
    fields = [_restored(cache, leaf, saved) for (_, cache, _), leaf in pairs]
    mx.eval(fields)
    assign([cache for _, cache, _ in result], fields)


def _supported(caches: Sequence[Any]) -> list[tuple[str, Any, Holding]]:
    result = checked_leaves(
        caches,
        lambda leaf: type(leaf) in HOLDINGS,
        "held by a snapshot",
        (kind.__name__ for kind in HOLDINGS),
    )
    return [(place, leaf, HOLDINGS[type(leaf)]) for place, leaf in result]


def _extent(caches: Sequence[Any]) -> int | None:
    """Return the number of tokens in the caches; None: unknown.

    For a batch, it is that of the longest row.
    """
    offsets = (_offset(leaf) for leaf in flat(caches))
    return max((each for each in offsets if each is not None), default=None)


def _offset(leaf: Any) -> int | None:
    offset: Any = getattr(leaf, "offset", None)
    if not isinstance(offset, mx.array):
        return offset  # type: ignore[no-any-return]
    furthest: Any = offset.max().item()
    return int(furthest)


def _check_offset(place: str, leaf: Any, extent: int | None, stop: int) -> None:
    """Refuse a leaf that cannot be cut at `stop`, or does not hold `extent` tokens."""
    kind, offset = type(leaf), extent
    if hasattr(leaf, "offset"):
        if leaf.empty():
            return  # the model does not use this layer, or nothing was fed
        offset = _offset(leaf)
    if HOLDINGS[kind].whole and offset is not None and offset != stop:
        raise UnsupportedCacheError(
            f"Layer {place} is a {kind.__name__}, which can be cut only at {offset}, "
            f"its offset, not at {stop}. Take the snapshot at {offset}."
        )
    if offset != extent:
        raise InvalidRequestError(
            f"Layer {place} holds {offset} tokens, and another layer {extent}. Pass "
            "caches whose layers were all fed the same tokens."
        )


def _bare(place: str, leaf: Any, holding: Holding) -> HeldLeaf:
    return HeldLeaf(place, type(leaf), holding.settings_of(leaf))


def _taken(place: str, leaf: Any, holding: Holding, start: int, stop: int) -> HeldLeaf:
    bare = _bare(place, leaf, holding)
    if holding.whole:
        return replace(bare, state=state_of(leaf))
    if start == stop or leaf.offset == 0:
        return bare
    return replace(bare, rows=(Rows(0, stop, buffers(leaf)).cut(start, stop),))


def _check_continues(target: Sequence[Any], saved: Snapshot) -> None:
    offset = _extent(target)
    if offset is not None and offset != saved.start:
        raise InvalidRequestError(
            f"The caches hold {offset} tokens, but the snapshot of "
            f"[{saved.start}, {saved.stop}) begins at {saved.start}. First restore "
            "the snapshot that ends there, or merge both snapshots."
        )


def _restored(cache: Any, leaf: HeldLeaf, saved: Snapshot) -> Fields:
    """Return new fields for a cache, with the contents of a leaf of the snapshot."""
    if leaf.state is not None:
        # Views, so that writes in place do not change the snapshot.
        return changed(leaf.state, lambda array: array[...])
    before = buffers(cache) if saved.start else ()
    if not leaf.rows:
        return {} if before else row_fields((), 0)
    parts = [Rows(0, saved.start, before).cut(0, saved.start).arrays] if before else []
    parts += [rows.arrays for rows in leaf.rows]
    stop = leaf.rows[-1].stop
    return row_fields(with_room(cache, parts, stop), stop)
