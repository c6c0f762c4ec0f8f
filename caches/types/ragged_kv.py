"""KV cache of a batch in which each row begins at column 0 and has its own end.

In mlx-lm's `BatchKVCache` all rows end at the same column, with padding on their left.
If rows keep different numbers of positions after a round, `BatchKVCache` has to move
some rows, which copies all of them. This cache writes each row after the row's own last
position. So a commit changes only the length of each row:

    rows of 5 and 2 positions, capacity 8      a b c d e . . .     x y . . . . . .
    a write of 3 to both                       a b c d e f g h     x y z u v . . .
    commit([1, 3])                             lengths 6 and 5, nothing is copied
    a write of 1 returns                       columns [0, 7); each row has its mask

The lengths are kept on the host, and are the same in all layers of a model. So arrays
that depend on the lengths are made on the host, once for all layers. Made on the GPU in
each layer, they would take a sixth of all kernels of a step.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_speculation.caches.types.buffers import buffers
from mlx_speculation.caches.types.padded_kv import asks_cudnn, whole_steps

Pair = tuple[Any, Any]  # keys and values; each is one array, or three if quantized


class RaggedKVCache(BatchKVCache):
    """Keys and values of several sequences, each from column 0 on."""

    def __init__(self, rows: int) -> None:
        self.keys: Any = None  # [rows, heads, columns, dim]; None: nothing written yet
        self.values: Any = None
        self.lengths = [0] * rows  # number of positions of each row
        # Whether writes of several positions return columns padded to whole steps where
        # that is faster, see padded_kv.py. Only for models that were tested with it.
        self.in_steps = False
        self.stepped = False  # whether the last mask or write was of several positions

    @property
    def offset(self) -> mx.array:  # type: ignore[override]
        """The lengths, int32 [rows]. Models read them, and must not write to them."""
        return _offset(tuple(self.lengths))

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """Return a batch with copies of the rows of these single-row caches."""
        merged = cls._of(caches)
        merged.lengths = [int(cache.offset) for cache in caches]
        columns = merged._whole(merged.columns)
        for row, cache in enumerate(caches):
            stop = cache.offset
            if stop:
                merged._widen((cache.keys, cache.values), columns)
                for whole, one in zip(buffers(merged), buffers(cache), strict=True):
                    whole[row : row + 1, :, :stop] = one[..., :stop, :]
        return merged

    @classmethod
    def _of(cls, caches: Sequence[Any]) -> "RaggedKVCache":
        return cls(len(caches))

    @property
    def columns(self) -> int:
        """Number of columns of the longest row."""
        return max(self.lengths, default=0)

    def needed(self, rows: Sequence[int] | None = None) -> int:
        """Return how many columns `rows` need, a multiple of `step`; None: all rows."""
        lengths = self.lengths if rows is None else [self.lengths[row] for row in rows]
        return self._whole(max(lengths, default=0))

    @property
    def shown(self) -> int:
        """Number of columns that the last write returned and that a read returns."""
        return self._shown(self.columns)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Write after each row's last position; return the first `shown` columns.

        Keys and values are [rows, heads, positions, dim].
        """
        width, lengths = keys.shape[2], self.lengths
        self.stepped = width > 1
        stop = self._shown(max(lengths) + width)
        empty = self.keys is None or self.values is None
        if empty or min(self.keys.shape[2], self.values.shape[2]) < stop:
            # Padded separately: an interruption may have left one of them shorter.
            columns = self._whole(stop)
            self.keys = self._padded(self.keys, keys, columns)
            self.values = self._padded(self.values, values, columns)
        if lengths.count(lengths[0]) == len(lengths):
            start = lengths[0]
            self.keys[..., start : start + width, :] = keys
            self.values[..., start : start + width, :] = values
        else:
            places = places_of(tuple(lengths), width)
            self.keys = mx.put_along_axis(self.keys, places, keys, axis=2)
            self.values = mx.put_along_axis(self.values, places, values, axis=2)
        self.lengths = list(map(width.__add__, lengths))  # faster than a comprehension
        return self.keys[..., :stop, :], self.values[..., :stop, :]

    def keys_and_values(self) -> Any:
        """Return the first `shown` columns of keys and values."""
        stop = self.shown
        return self.keys[..., :stop, :], self.values[..., :stop, :]

    def make_mask(  # type: ignore[override]
        self,
        N: int,  # noqa: N803  mlx-lm's name
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        """Return a mask of the columns that the next N positions of each row see.

        If all rows have the same length and no array is needed, the mask is None for
        one position and "causal" for several.
        """
        self.stepped, lengths = N > 1, tuple(self.lengths)
        written = max(lengths, default=0) + N
        stop = self._shown(written)
        even = len(set(lengths)) == 1 and stop == written
        if even and window_size is None and not return_array:
            return None if N == 1 else "causal"
        columns = mx.arange(stop, dtype=mx.int32)
        last = _offset(lengths)[:, None, None, None]
        last = last + mx.arange(N, dtype=mx.int32)[:, None]  # [rows, 1, N, 1]
        mask = columns <= last
        if window_size is not None:
            mask = mask & (columns > last - window_size)
        return mask

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows, in this order, and cut off columns that no row needs."""
        places = mx.array(batch_indices)
        order: Any = batch_indices
        if isinstance(order, mx.array):
            order = order.tolist()
        self.lengths = [self.lengths[index] for index in order]
        if self.keys is not None:
            stop = self._whole(self.shown)
            self._change(lambda array: taken(array, places)[..., :stop, :])

    def extend(self, other: Any) -> None:
        """Append the rows of another batch."""
        some: Any = self if self.keys is not None else other
        if some.keys is not None:
            stop = max(self._columns_held, other._columns_held)
            like = (some.keys, some.values)
            self._widen(like, stop)
            added = copy(other)
            added._widen(like, stop)
            new = (added.keys, added.values)
            self._change(lambda *both: mx.concatenate([*both]), new)
        self.lengths = self.lengths + other.lengths

    def extract(self, idx: int) -> Any:
        """Return a copy of one row as a single-row cache."""
        cache, stop = self._row(), self.lengths[idx]
        if self.keys is not None and stop:
            cache.keys, cache.values = tree_map(
                lambda array: mx.contiguous(array[idx : idx + 1, :, :stop]),
                (self.keys, self.values),
            )
            cache.offset = stop
        return cache

    def _row(self) -> Any:
        return KVCache()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, unused columns included."""
        return sum(array.nbytes for array in buffers(self))

    @property  # type: ignore[misc]  # no setter: it is never loaded
    def state(self) -> Any:
        """The arrays of the cache, for `mx.eval`."""
        return self.keys, self.values

    def _shown(self, columns: int) -> int:
        """Return how many columns the model sees if `columns` are written."""
        if self.stepped and self.in_steps and self.keys is not None:
            return whole_steps(columns) if asks_cudnn(self.keys.dtype) else columns
        return columns

    @property
    def _columns_held(self) -> int:
        return 0 if self.keys is None else int(buffers(self)[0].shape[2])

    def _change(self, change: Callable[..., mx.array], *others: Pair) -> None:
        """Replace each array by `change` of it and of its counterparts in `others`."""
        self.keys, self.values = tree_map(change, (self.keys, self.values), *others)

    def _widen(self, like: Pair, columns: int) -> None:
        """Grow the arrays to at least `columns` columns; without arrays, make zeros."""
        if self.keys is None:
            self.keys, self.values = tree_map(
                lambda one: self._padded(None, one, columns), like
            )
        else:
            self._change(lambda array: self._padded(array, array, columns))

    def _whole(self, columns: int) -> int:
        """Return `columns` rounded up to a multiple of `step`."""
        return -(-columns // self.step) * self.step

    def _padded(self, array: Any, like: mx.array, columns: int) -> mx.array:
        """Return `array` padded to at least `columns` columns; for None, zeros."""
        if array is None:
            _, heads, _, dim = like.shape
            return mx.zeros((len(self.lengths), heads, columns, dim), like.dtype)
        more = columns - array.shape[2]
        if more <= 0:
            return array  # type: ignore[no-any-return]
        padded: mx.array = mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)])
        return padded


def taken(array: mx.array, places: mx.array) -> mx.array:
    """Return the rows at `places` of an array."""
    # On CUDA, mlx copies element by element, so view eight bytes as one element.
    if array.shape[-1] * array.itemsize % mx.uint64.size:
        return array[places]
    return array.view(mx.uint64)[places].view(array.dtype)


@lru_cache(maxsize=4)  # a target and a draft model can run in turn
def _offset(lengths: tuple[int, ...]) -> mx.array:
    return mx.array(lengths, mx.int32)


@lru_cache(maxsize=4)
def places_of(lengths: tuple[int, ...], width: int) -> mx.array:
    """Return the next `width` columns of each row, int32 [rows, 1, width, 1]."""
    places = np.add.outer(np.array(lengths), np.arange(width)).astype(np.int32)
    return mx.array(places[:, None, :, None])
