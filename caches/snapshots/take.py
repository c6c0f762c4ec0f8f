"""Taking snapshots of live caches, and restoring them.

`caches.snapshots.snapshot` defines a snapshot, and joins and cuts snapshots.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_speculation.caches.snapshots.per_kind import (
    HOLDINGS,
    Fields,
    Holding,
    copied,
    row_fields,
    with_room,
)
from mlx_speculation.caches.snapshots.per_kind_batch import Lags, batch_extent
from mlx_speculation.caches.snapshots.snapshot import (
    HeldLeaf,
    Snapshot,
    check_lags,
    check_same,
)
from mlx_speculation.caches.types.leaves import (
    assign,
    checked_leaves,
    is_batch,
    leaves,
    position,
)
from mlx_speculation.caches.types.shared_rows import Rows, aliased, buffers, native_type
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError


def snapshot(
    caches: Sequence[Any], start: int = 0, stop: int | None = None
) -> Snapshot:
    """Return a snapshot of the caches for the tokens [start, stop).

    Args:
        caches: mlx-lm caches, one per layer as `make_prompt_cache` returns them.
        start: the first token. Rows of earlier tokens are left out.
        stop: the end of the range. None: the number of tokens that the caches hold; if
            no cache knows that number (models of recurrent layers only), it has to be
            passed. A smaller number is legal if all caches can be cut.

    Raises:
        UnsupportedCacheError: a snapshot cannot hold a cache of this kind, or the cache
            cannot be cut at `stop`.
        InvalidRequestError: the range is not in the caches, or the caches hold
            different numbers of tokens.
    """
    result = _supported(caches)
    extent, lags = _extent(caches)
    if stop is None:
        stop = extent
    if stop is None:
        raise InvalidRequestError(
            "No cache knows how many tokens it holds, and stop is None. Pass the "
            "number of tokens that the caches were fed."
        )
    if not 0 <= start <= stop or (extent is not None and stop > extent):
        raise InvalidRequestError(
            f"The range [{start}, {stop}) was asked for, and the caches hold "
            f"[0, {stop if extent is None else extent}). Ask for a part of that."
        )
    for place, leaf, _ in result:
        _check_offset(place, leaf, extent, stop)
    taken = tuple(_taken(*one, extent, start, stop) for one in result)
    mx.eval([leaf.state for leaf in taken])
    return Snapshot(start, stop, taken, lags)


def restore(saved: Snapshot, target: Sequence[Any]) -> None:
    """Replace the contents of caches by those of a snapshot.

    If the snapshot's `start` is above 0, the caches have to hold exactly the `start`
    tokens before it, which stay. Everything is checked and built before the first cache
    changes. The rows are copied once, with room for more.

    Args:
        saved: the snapshot.
        target: live caches of the same model.

    Raises:
        InvalidRequestError: the caches are those of another model, or do not hold
            `start` tokens.
        UnsupportedCacheError: the snapshot lacks the state of a recurrent layer.
    """
    result = _supported(target)
    if saved.stateless is not None:
        leaf = saved.stateless
        raise UnsupportedCacheError(
            f"Layer {leaf.place} is a {leaf.kind.__name__}, and this snapshot of "
            f"[{saved.start}, {saved.stop}) has no state of it. Restore at an offset "
            "where one was taken."
        )
    check_same([_bare(*one) for one in result], saved.leaves)
    if saved.start:
        _check_continues(target, saved)
    pairs = list(zip(result, saved.leaves, strict=True))
    fields = [_restored(cache, leaf, saved) for (_, cache, _), leaf in pairs]
    mx.eval(fields)
    assign([cache for _, cache, _ in result], fields)


def _supported(caches: Sequence[Any]) -> list[tuple[str, Any, Holding]]:
    """Return place, cache and `Holding` of every leaf; refuse unknown kinds."""
    result = checked_leaves(
        caches,
        lambda leaf: native_type(leaf) in HOLDINGS,
        "held by a snapshot",
        (kind.__name__ for kind in HOLDINGS),
    )
    return [(place, leaf, HOLDINGS[native_type(leaf)]) for place, leaf in result]


def _extent(caches: Sequence[Any]) -> tuple[int | None, Lags]:
    """Return the number of tokens in the caches (None: unknown) and the rows' lags."""
    batches = [(place, leaf) for place, leaf in leaves(caches) if is_batch(leaf)]
    return batch_extent(batches) if batches else (position(caches), ())


def _check_offset(place: str, leaf: Any, extent: int | None, stop: int) -> None:
    """Refuse a leaf that does not hold `stop` tokens and cannot be cut there."""
    kind = native_type(leaf)
    # `batch_extent` has compared the rows of batch caches.
    offset = extent if is_batch(leaf) else getattr(leaf, "offset", extent)
    if (offset == 0 or is_batch(leaf)) and leaf.empty():
        return  # the model does not use this layer, or nothing was fed
    if HOLDINGS[kind].whole and offset is not None and offset != stop:
        raise UnsupportedCacheError(
            f"Layer {place} is a {kind.__name__}, which can be cut at {offset} only, "
            f"where it stands, and not at {stop}. Take the snapshot there."
        )
    if offset is not None and extent is not None and offset != extent:
        raise InvalidRequestError(
            f"Layer {place} holds {offset} tokens, and another {extent}. The layers of "
            "a model move together: pass caches that were fed the same tokens."
        )


def _bare(place: str, leaf: Any, holding: Holding) -> HeldLeaf:
    return HeldLeaf(place, native_type(leaf), holding.settings(leaf))


def _taken(
    place: str, leaf: Any, holding: Holding, extent: int | None, start: int, stop: int
) -> HeldLeaf:
    bare = _bare(place, leaf, holding)
    if holding.state is not None:
        return replace(bare, state=copied(holding.state(leaf)))
    empty = leaf.empty() if is_batch(leaf) else leaf.offset == 0
    if start == stop or empty:
        return bare
    first = _first_position(leaf, extent)
    return replace(bare, rows=(Rows(buffers(leaf), first, start, stop, leaf),))


def _first_position(leaf: Any, extent: int | None) -> int:
    """Return the position of row 0 of the buffers; negative if it is padding."""
    return 0 if extent is None or not is_batch(leaf) else extent - leaf._idx


def _check_continues(target: Sequence[Any], saved: Snapshot) -> None:
    """Refuse caches that do not hold exactly the tokens before the snapshot."""
    offset, lags = _extent(target)
    if offset is not None and offset != saved.start:
        raise InvalidRequestError(
            f"The caches hold {offset} tokens, and the snapshot of "
            f"[{saved.start}, {saved.stop}) goes on from {saved.start}. Restore "
            "what is before it first, or merge the two."
        )
    check_lags(lags, saved.lags)


def _restored(cache: Any, leaf: HeldLeaf, saved: Snapshot) -> Fields:
    """Return new fields for a cache, with the contents of a leaf of the snapshot."""
    if leaf.whole:
        return aliased(leaf.state)  # type: ignore[no-any-return]
    if not leaf.rows:
        kept = buffers(cache)
        return {} if saved.start and kept else row_fields(cache, (), 0, saved.lags)
    parts = []
    if saved.start:
        rows = slice(-_first_position(cache, saved.start), None)
        before = (array[..., rows, :] for array in buffers(cache))
        parts.append(tuple(array[..., : saved.start, :] for array in before))
    parts += [rows.slices() for rows in leaf.rows]
    stop = leaf.rows[-1].stop
    return row_fields(cache, with_room(cache, parts, stop), stop, saved.lags)
