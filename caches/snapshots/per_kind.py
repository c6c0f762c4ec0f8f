"""Snapshots of each cache kind: as rows, or as a whole state.

    kind                                              saved as
    KVCache, QuantizedKVCache, ConcatenateKVCache     rows, which can be cut anywhere
    RotatingKVCache, SlidingKVCache, ChunkedKVCache,  a state, which exists only at
    ArraysCache, deepseek_v41.LayerCache,             the offset where it was taken
    BatchKVCache, BatchRotatingKVCache

A state is copied when it is taken: a ring is written in place, and recurrent slots are
often small views that would keep large arrays in memory.
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

from mlx_speculation.caches.types.buffers import Arrays, own
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Holding:
    """Snapshot form of one kind."""

    # Fields that must be equal in the snapshot and in the cache that it is put into.
    settings: tuple[str, ...] = ()
    whole: bool = True  # True: the kind is saved as a state; False: as rows

    def settings_of(self, cache: Any) -> tuple[Any, ...]:
        """Return the values of `settings`, and the number of recurrent slots."""
        slots = (len(cache.cache),) if isinstance(cache, ArraysCache) else ()
        return (*(getattr(cache, name) for name in self.settings), *slots)


HOLDINGS: dict[type, Holding] = {
    KVCache: Holding(whole=False),
    QuantizedKVCache: Holding(("group_size", "bits"), whole=False),
    ConcatenateKVCache: Holding(whole=False),
    RotatingKVCache: Holding(("max_size", "keep")),
    SlidingKVCache: Holding(("max_size", "slack")),
    ChunkedKVCache: Holding(("chunk_size",)),
    ArraysCache: Holding(),
    LayerCache: Holding(("window_size",)),
    BatchKVCache: Holding(),
    BatchRotatingKVCache: Holding(("max_size",)),
}


def state_of(cache: Any) -> Fields:
    """Return copies, not evaluated, of the fields of a cache that is saved as a state.

    Rows to which no later token attends are left out: rows before a sliding window, the
    oldest rows of a ring that a write of several rows has made longer than its window,
    and a ring's unused slots.
    """
    fields, both = dict(vars(cache)), ("keys", "values")
    if isinstance(cache, SlidingKVCache) and cache.keys is not None:
        count = min(cache.offset, cache.max_size)
        rows = slice(cache._end - count, cache._end)
        fields |= {name: fields[name][..., rows, :] for name in both}
        fields |= {"_first": 0, "_end": count}
    elif isinstance(cache, RotatingKVCache) and cache.keys is not None:
        ring: Any = cache
        excess = ring.keys.shape[2] - ring.max_size
        if excess > 0 and ring._idx == ring.keys.shape[2]:
            fields |= {name: ring._trim(excess, fields[name]) for name in both}
            fields["_idx"] = ring.max_size
        elif ring._idx == ring.offset:
            fields |= {name: fields[name][..., : ring.offset, :] for name in both}
    return changed(fields, own)


def changed(fields: Fields, change: Callable[[mx.array], mx.array]) -> Fields:
    """Return the fields with `change` applied to each array in them."""
    result: Fields = tree_map(
        lambda x: change(x) if isinstance(x, mx.array) else x, fields
    )
    return result


def arrays_of(fields: Fields | None) -> list[mx.array]:
    """Return every array of a state."""
    values: Any = tree_flatten(fields)
    return [value for _, value in values if isinstance(value, mx.array)]


def with_room(cache: Any, parts: list[Arrays], rows: int) -> Arrays:
    """Return the parts joined, with room for the next rows."""
    # A cache with a `step` is written in place; without room, a write would copy it.
    step = getattr(cache, "step", None)
    room = 0 if step is None else step - rows % step

    def joined(same: Arrays) -> mx.array:
        like = same[0]
        more = mx.zeros((*like.shape[:-2], room, like.shape[-1]), like.dtype)
        return mx.concatenate([*same, more], axis=-2)

    return tuple(map(joined, zip(*parts, strict=True)))


def row_fields(arrays: Arrays, rows: int) -> Fields:
    """Return the fields of a cache with these arrays, which hold `rows` rows."""
    half = len(arrays) // 2
    keys, values = arrays[:half], arrays[half:]
    if half == 1:
        return {"keys": keys[0], "values": values[0], "offset": rows}
    return {"keys": keys or None, "values": values or None, "offset": rows}
