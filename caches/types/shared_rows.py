"""Rows of a KV cache that a snapshot shares with the live cache as long as possible.

mlx writes `a[i:j] = x` in place if no second array refers to the buffer of `a`. With
such an alias, the next write copies the whole buffer. So a snapshot of live rows makes
no alias: it refers to the cache's own array objects, and keeps the range of its rows.
Writes past the range do not change the snapshot.

    cache at offset 8, snapshot of [0, 8)        0 bytes, 0 copies
    a write of rows [8, 11)                      in place, 0 copies
    the buffers grow                             the snapshot follows to the new ones
    trimmed to 6, then a write of row 6          rows [0, 8) are copied first
    `cache.state = ...`, or the cache is freed   the snapshot keeps the old buffers

For the fourth line, each write has to be watched. While a snapshot shares a cache's
rows, the cache's class is a subclass that checks before each write, also before those
of mlx-lm. The instance, its fields and its class name stay, and the class is restored
when no rows are shared any more. `state` and `copy.copy` of a watched cache return
aliases, so that writes through them do not change the shared rows.

Each write then costs a check of the offset, and a copy of the range if it would overlap
the range. Direct writes into the arrays `keys` and `values` are not seen; nothing in
mlx-lm makes them.
"""

import copyreg
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

Arrays = tuple[mx.array, ...]


def buffers(cache: Any) -> Arrays:
    """Return the arrays with a cache's rows, on axis -2; none for an empty cache."""
    if cache.keys is None:
        return ()
    if isinstance(cache.keys, mx.array):
        return cache.keys, cache.values
    return *cache.keys, *cache.values


def aliased(value: Any) -> Any:
    """Return `value` with aliases of its arrays, so that writes to it copy them."""
    return tree_map(lambda x: x[...] if isinstance(x, mx.array) else x, value)


def own(array: mx.array, axis: int = 0) -> mx.array:
    """Return a copy in a new buffer of exactly its size, not evaluated.

    `mx.contiguous` would share the buffer if the slice is nearly all of it.
    """
    none = array[:0] if axis == 0 else array[..., :0, :]
    return mx.concatenate([array, none], axis=axis)


class Rows:
    """Rows [start, stop) of one cache, by position.

    Attributes:
        start: the first position.
        stop: the position after the last.
    """

    def __init__(
        self, arrays: Arrays, first: int, start: int, stop: int, cache: Any = None
    ) -> None:
        """Hold rows of `arrays`, whose row 0 is position `first`.

        `first` is negative if all rows of a batch begin with padding. With `cache`, the
        arrays are those of this live cache, which is watched if it writes in place.
        """
        self._arrays, self._first = arrays, first
        self.start, self.stop = start, stop
        self._cache: weakref.ref[Any] | None = None
        if cache is not None:
            self._cache = weakref.ref(cache)
            _watch(cache, self)

    @property
    def shared(self) -> bool:
        """Return whether a live cache has the arrays too."""
        cache = self._cache() if self._cache is not None else None
        return cache is not None and _same(buffers(cache), self._arrays)

    def buffers(self) -> Arrays:
        """Return the arrays that this object keeps in memory beyond a live cache's."""
        return () if self.shared else self._arrays

    def slices(self) -> Arrays:
        """Return aliases of the rows, which must not be kept across a write."""
        low, high = self.start - self._first, self.stop - self._first
        return tuple(array[..., low:high, :] for array in self._arrays)

    def cut(self, start: int, stop: int) -> "Rows":
        """Return a part of the rows in the same arrays."""
        cache = self._cache() if self.shared and self._cache is not None else None
        return Rows(self._arrays, self._first, start, stop, cache)

    def secure(self) -> None:
        """Copy the rows, so that no cache holds their arrays."""
        copies = tuple(own(rows, axis=-2) for rows in self.slices())
        mx.eval(copies)
        self._arrays, self._first, self._cache = copies, self.start, None

    def before_write(self, cache: Any) -> bool:
        """Copy the rows if the next write overlaps; return whether they stay shared."""
        if not self.shared:
            self._cache = None
        elif self.stop > self._first + _end(cache):
            self.secure()
        return self._cache is not None

    def after_write(self, cache: Any) -> None:
        """Refer to the cache's buffers again, which may have grown."""
        self._arrays = buffers(cache)


def _end(cache: Any) -> int:
    """Return the buffer row at which the next write begins."""
    batch = native_type(cache) is BatchKVCache
    return int(cache._idx if batch else cache.offset)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        one is other for one, other in zip(some, others, strict=True)
    )


class _Watch:
    """Methods that a watched class adds to mlx-lm's class."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Copy the rows that the write would overlap, then write as mlx-lm does."""
        cache: Any = self
        watched = [rows for rows in _watched(cache) if rows.before_write(cache)]
        shown = super().update_and_fetch(keys, values)  # type: ignore[misc]
        for rows in watched:
            rows.after_write(cache)
        if watched:
            _WATCHED[cache] = weakref.WeakSet(watched)
        else:
            _WATCHED.pop(cache, None)
            cache.__class__ = native_type(cache)
        return shown

    @property
    def state(self) -> Any:
        """The state of mlx-lm's cache, with aliases of the arrays."""
        return aliased(super().state)  # type: ignore[misc]

    @state.setter
    def state(self, value: Any) -> None:
        native: Any = native_type(self)
        native.state.fset(self, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        fields = aliased(vars(self))
        return copyreg.__newobj__, (native_type(self),), fields  # type: ignore[attr-defined]


# They have mlx-lm's class names, by which mlx-lm saves and loads caches.
WATCHED_TYPES: dict[type, type] = {
    native: type(native.__name__, (_Watch, native), {"__doc__": native.__doc__})
    for native in (KVCache, QuantizedKVCache, BatchKVCache)
}
_NATIVE = {watched: native for native, watched in WATCHED_TYPES.items()}
_WATCHED: "weakref.WeakKeyDictionary[Any, weakref.WeakSet[Rows]]" = (
    weakref.WeakKeyDictionary()
)


def native_type(cache: Any) -> type:
    """Return mlx-lm's class of a cache, even if the cache is watched."""
    return _NATIVE.get(type(cache), type(cache))


def _watched(cache: Any) -> Iterator[Rows]:
    return iter(list(_WATCHED.get(cache, ())))


def _watch(cache: Any, rows: Rows) -> None:
    native = native_type(cache)
    if native in WATCHED_TYPES:
        _WATCHED.setdefault(cache, weakref.WeakSet()).add(rows)
        cache.__class__ = WATCHED_TYPES[native]
