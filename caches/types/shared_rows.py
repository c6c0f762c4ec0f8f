"""Rows of a KV cache that a snapshot holds, shared with the live cache while it lasts.

mlx writes `a[i:j] = x` into the Python object `a`, in place while no second array
refers to its buffer. Any such alias makes the next write copy the whole buffer. So a
snapshot of a live range makes no alias: it keeps the very array objects of the cache
and the range of rows in them. Writes past the range do not concern it.

    cache at offset 8, snapshot of [0, 8)        0 bytes, 0 copies
    a write of rows [8, 11)                      in place, 0 copies
    the buffers grow                             the snapshot follows to the new ones
    trimmed to 6, then a write of row 6          rows [0, 8) are copied first
    `cache.state = ...`, or the cache is freed   the snapshot is left with the old ones

The fourth line needs somebody who sees the write. While a cache has such rows, its
class is a subclass that looks before each write, as a recorded mixer's is; the
instance, its fields and its name stay, and with the last rows the class goes back.
So a write by mlx-lm itself is seen too. `state` and `copy.copy` of a watched cache
hand out aliases, so that what is written through them is not written here.

Price: a look at the offset per write, and one copy of the range where a write would
overlap it. What cannot be seen is a write into the arrays themselves, taken from the
fields `keys` and `values`; nothing in mlx-lm does that.
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
    """Return the arrays that hold a cache's rows along axis -2; none while empty."""
    if cache.keys is None:
        return ()
    if isinstance(cache.keys, mx.array):
        return cache.keys, cache.values
    return *cache.keys, *cache.values


def aliased(value: Any) -> Any:
    """Alias every array in `value`: a write to the one leaves the other as it was."""
    return tree_map(lambda x: x[...] if isinstance(x, mx.array) else x, value)


def own(array: mx.array, axis: int = 0) -> mx.array:
    """Return a copy in a buffer of its own size, not yet evaluated.

    `mx.contiguous` shares the buffer of a slice that is nearly all of it.
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

        That is below 0 where a batch begins with padding that all its rows share.

        With `cache`, they are the arrays of that live cache, and are watched if it
        is one that writes in place.
        """
        self._arrays, self._first = arrays, first
        self.start, self.stop = start, stop
        self._cache: weakref.ref[Any] | None = None
        if cache is not None:
            self._cache = weakref.ref(cache)
            _watch(cache, self)

    @property
    def shared(self) -> bool:
        """Return whether the arrays are held by a live cache anyway."""
        cache = self._cache() if self._cache is not None else None
        return cache is not None and _same(buffers(cache), self._arrays)

    def buffers(self) -> Arrays:
        """Return the arrays that this object keeps in memory, whole."""
        return () if self.shared else self._arrays

    def slices(self) -> Arrays:
        """Return the rows, as aliases: do not keep them across a write."""
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
        """Get ready for a write at the offset; return whether it is still watched."""
        if not self.shared:
            self._cache = None
        elif self.stop > self._first + _end(cache):
            self.secure()
        return self._cache is not None

    def after_write(self, cache: Any) -> None:
        """Follow the cache to buffers that have grown."""
        self._arrays = buffers(cache)


def _end(cache: Any) -> int:
    """Return the row of the buffers that the next write begins with."""
    batch = native_type(cache) is BatchKVCache
    return int(cache._idx if batch else cache.offset)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        one is other for one, other in zip(some, others, strict=True)
    )


class _Watch:
    """Methods that a watched class adds to its native one."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Secure the rows that the write would overlap, then write as ever."""
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
        """The native state, with aliases in place of the arrays."""
        return aliased(super().state)  # type: ignore[misc]

    @state.setter
    def state(self, value: Any) -> None:
        native: Any = native_type(self)
        native.state.fset(self, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        fields = aliased(vars(self))
        return copyreg.__newobj__, (native_type(self),), fields  # type: ignore[attr-defined]


# Of the same name, under which mlx-lm saves and loads the cache.
WATCHED_TYPES: dict[type, type] = {
    native: type(native.__name__, (_Watch, native), {"__doc__": native.__doc__})
    for native in (KVCache, QuantizedKVCache, BatchKVCache)
}
_NATIVE = {watched: native for native, watched in WATCHED_TYPES.items()}
_WATCHED: "weakref.WeakKeyDictionary[Any, weakref.WeakSet[Rows]]" = (
    weakref.WeakKeyDictionary()
)


def native_type(cache: Any) -> type:
    """Return mlx-lm's own class of a cache, also while it is watched."""
    return _NATIVE.get(type(cache), type(cache))


def _watched(cache: Any) -> Iterator[Rows]:
    return iter(list(_WATCHED.get(cache, ())))


def _watch(cache: Any, rows: Rows) -> None:
    native = native_type(cache)
    if native in WATCHED_TYPES:
        _WATCHED.setdefault(cache, weakref.WeakSet()).add(rows)
        cache.__class__ = WATCHED_TYPES[native]
