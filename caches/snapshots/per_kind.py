"""Snapshots of each cache kind: as rows, or as a whole state.

    kind                                              saved as
    KVCache, QuantizedKVCache, ConcatenateKVCache,    rows, which can be cut anywhere
    BatchKVCache
    RotatingKVCache, SlidingKVCache, ChunkedKVCache,  a state, which exists only at
    ArraysCache, deepseek_v41.LayerCache,             the offset where it was taken
    BatchRotatingKVCache

A ring has overwritten or dropped the rows that it does not need at its offset, and a
recurrent state never had rows. A state is copied when it is taken: a ring is written in
place, and recurrent slots are often small views of large arrays, which they would keep
in memory. This costs one copy of the window or of the slots.

A further kind needs one more line in `HOLDINGS`. A batch is saved as a whole, see
`caches.snapshots.per_kind_batch`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches.snapshots.per_kind_batch import (
    Lags,
    batch_fields,
    batch_ring_state,
)
from mlx_speculation.caches.types.shared_rows import Arrays, native_type, own
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Holding:
    """Snapshot form of one kind."""

    # The fields in which the source and the target must agree.
    settings: Callable[[Any], tuple[Any, ...]]
    # Returns the fields of a whole state, not copied; None: the kind is saved as rows.
    state: Callable[[Any], Fields] | None = None

    @property
    def whole(self) -> bool:
        """Return whether the kind is saved as a state."""
        return self.state is not None


def _ring_state(cache: Any) -> Fields:
    """Return the fields with only the rows that later writes can see.

    A ring that is not full has unused slots at its end. After a write of many rows, a
    ring has more rows than its window; the next write drops the oldest.
    """
    keys, values, index = cache.keys, cache.values, cache._idx
    if keys is not None:
        excess = keys.shape[2] - cache.max_size
        if excess > 0 and index == keys.shape[2]:
            keys, values = cache._trim(excess, keys), cache._trim(excess, values)
            index = cache.max_size
        elif index == cache.offset:
            keys, values = keys[..., :index, :], values[..., :index, :]
    return {"keys": keys, "values": values, "offset": cache.offset, "_idx": index}


def _sliding_state(cache: Any) -> Fields:
    """Return the fields with the window only; earlier rows are only for an undo."""
    keys, values = cache.keys, cache.values
    count = min(cache.offset, cache.max_size)
    if keys is not None:
        rows = slice(cache._end - count, cache._end)
        keys, values = keys[..., rows, :], values[..., rows, :]
    fields = {"keys": keys, "values": values, "offset": cache.offset}
    return {**fields, "_first": 0, "_end": count}


def _chunk_state(cache: Any) -> Fields:
    keys, values = (None, None) if cache.keys is None else cache.keys_and_values()
    return {
        "keys": keys,
        "values": values,
        "offset": cache.offset,
        "start_position": cache.start_position,
    }


def _arrays_state(cache: Any) -> Fields:
    return {
        "cache": list(cache.cache),
        "lengths": cache.lengths,
        "left_padding": cache.left_padding,
    }


def _layer_state(cache: Any) -> Fields:
    return {name: x for name, x in vars(cache).items() if name != "window_size"}


HOLDINGS: dict[type, Holding] = {
    KVCache: Holding(lambda cache: ()),
    QuantizedKVCache: Holding(lambda cache: (cache.group_size, cache.bits)),
    ConcatenateKVCache: Holding(lambda cache: ()),
    RotatingKVCache: Holding(lambda ring: (ring.max_size, ring.keep), _ring_state),
    SlidingKVCache: Holding(
        lambda cache: (cache.max_size, cache.slack), _sliding_state
    ),
    ChunkedKVCache: Holding(lambda cache: (cache.chunk_size,), _chunk_state),
    ArraysCache: Holding(lambda cache: (len(cache.cache),), _arrays_state),
    LayerCache: Holding(lambda cache: (cache.window_size,), _layer_state),
    BatchKVCache: Holding(lambda cache: ()),
    BatchRotatingKVCache: Holding(lambda ring: (ring.max_size,), batch_ring_state),
}


def copied(fields: Fields) -> Any:
    """Return the fields with copies of their arrays, not evaluated."""
    return tree_map(lambda x: own(x) if isinstance(x, mx.array) else x, fields)


def arrays_of(fields: Fields | None) -> list[mx.array]:
    """Return every array of a state."""
    values: Any = tree_flatten(fields)
    return [value for _, value in values if isinstance(value, mx.array)]


def with_room(cache: Any, parts: list[Arrays], rows: int) -> Arrays:
    """Return the parts joined, with room for the next rows.

    Only caches that are written in place (they have a `step`) need room, since the next
    write would otherwise copy the buffers.
    """
    step = getattr(cache, "step", None)
    room = 0 if step is None else step - rows % step

    def joined(same: Arrays) -> mx.array:
        like = same[0]
        more = mx.zeros((*like.shape[:-2], room, like.shape[-1]), like.dtype)
        return mx.concatenate([*same, more], axis=-2)

    return tuple(map(joined, zip(*parts, strict=True)))


def row_fields(cache: Any, arrays: Arrays, rows: int, lags: Lags) -> Fields:
    """Return the fields of a cache with these arrays, up to position `rows`."""
    if native_type(cache) is BatchKVCache:
        return batch_fields(arrays, rows, lags)
    half = len(arrays) // 2
    keys, values = arrays[:half], arrays[half:]
    if half == 1:
        return {"keys": keys[0], "values": values[0], "offset": rows}
    return {"keys": keys or None, "values": values or None, "offset": rows}
