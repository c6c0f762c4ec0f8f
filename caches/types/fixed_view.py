"""Keys and values in views whose size depends only on the position of a row.

A row's result depends on the shapes of the operations that compute it. So in exact mode
every forward has the same number of tokens, and a row at position p gets a view of V(p)
rows of a cache, with V(p) = step * (p // step + 1). A mask hides the positions after p:

    step 256, rows 8    offset 3      256 keys, bool mask [8, 256]
                        offset 250    256 keys; only rows 250 to 255 are written
                        offset 256    512 keys

All rows of a forward share a view, so a forward takes only tokens up to the next step.
A buffer is exactly as long as its view, so its strides too depend only on the position.

The view of a sliding window has the positions [max(0, start - max_size), start + step),
where `start` is the last multiple of `step` up to p. Rows at [start, start + step) see
no position outside of it.

A view shares the `__dict__` of its live cache, so it has the same offset and buffers.
Moving the offset undoes writes.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from mlx_speculation.caches.types.buffers import buffers
from mlx_speculation.caches.types.padded_kv import with_room
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache
from mlx_speculation.errors import InvalidRequestError

ROWS, MOST_ROWS = 8, 64
STEP = 256


@dataclass(frozen=True, slots=True)
class FixedShape:
    """The shape of every forward in exact mode.

    Raises:
        InvalidRequestError: a number is out of its range.
    """

    rows: int = ROWS  # rows of a forward: the last token, drafts and padding; 2 to 64
    step: int = STEP  # the view of the keys grows by this many rows; at least `rows`

    def __post_init__(self) -> None:
        if type(self.rows) is not int or not 2 <= self.rows <= MOST_ROWS:
            raise InvalidRequestError(
                f"The number of rows is {self.rows!r}; it has to be a whole number "
                f"from 2 to {MOST_ROWS}: one row for the last token, the others for "
                f"drafts. {ROWS} is usual."
            )
        if type(self.step) is not int or self.step < self.rows:
            raise InvalidRequestError(
                f"The step of the views is {self.step!r}; it has to be a whole number "
                f"of at least {self.rows}, the rows of a forward. {STEP} is usual."
            )

    def shown(self, position: int) -> int:
        """Return V(position), the number of rows in the view at this position."""
        return self.step * (position // self.step + 1)

    def room(self, position: int) -> int:
        """Return how many tokens a forward at a position can take, at least 1."""
        return min(self.rows, self.shown(position) - position)


def fixed_mask(
    rows: int, offset: int, first: int, stop: int, window: int | None
) -> mx.array:
    """Return the mask of `rows` rows from `offset` on, bool [rows, stop - first].

    The columns are the positions [first, stop). A row at or past `stop` sees the same
    as a row at `stop` - 1, so that no row of the mask is empty. `window` is the number
    of positions that a row sees, itself included; None: all.
    """
    positions = mx.minimum(mx.arange(offset, offset + rows), stop - 1)[:, None]
    columns = mx.arange(first, stop)[None]
    mask = columns <= positions
    if window is not None:
        mask = mask & (columns > positions - window)
    return mask


class _FixedRows:
    """Fixed view of a live cache of a kind that evicts no rows."""

    __slots__ = ()
    _shape: FixedShape

    def make_mask(
        self,
        N: int,  # noqa: N803  some models pass it by name
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array:
        """Return the mask of the next rows, bool [N, V(offset)]."""
        live: Any = self
        stop = self._shape.shown(live.offset)
        return fixed_mask(N, live.offset, 0, stop, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Write the rows [batch, heads, rows, dim] that fit; return the view."""
        live: Any = self
        start, rows = live.offset, keys.shape[2]
        stop = self._shape.shown(start)
        fits = slice(min(rows, stop - start))
        _fit(self, stop)
        super().update_and_fetch(keys[..., fits, :], values[..., fits, :])  # type: ignore[misc]
        _fit(self, stop)  # after a first write, buffers have mlx-lm's size
        live.offset = start + rows
        return live.keys, live.values

    def keys_and_values(self) -> Any:
        """Return the view, as the last write did."""
        live: Any = self
        return live.keys, live.values


class FixedKVCache(_FixedRows, KVCache):
    """A `KVCache` in a fixed view."""

    __slots__ = ("_shape",)


class FixedQuantizedKVCache(_FixedRows, QuantizedKVCache):
    """A `QuantizedKVCache` in a fixed view."""

    __slots__ = ("_shape",)


class FixedSlidingKVCache(SlidingKVCache):
    """A `SlidingKVCache` in a fixed view, which begins at row 0 of the buffers."""

    __slots__ = ("_shape",)
    _shape: FixedShape

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """Return the mask of the next rows, bool [n, size of the view]."""
        window = min(window_size or self.max_size, self.max_size)
        first, stop = self._range()
        return fixed_mask(n, self.offset, first, stop, window)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Write the rows that fit into the view, and return the view."""
        first, stop = self._range()
        start, rows = self.offset - first, keys.shape[2]
        fits = min(rows, stop - self.offset)
        self._lay_out(first, stop, keys, values)
        self.keys[..., start : start + fits, :] = keys[..., :fits, :]
        self.values[..., start : start + fits, :] = values[..., :fits, :]
        self._first = max(start + 1 - self.max_size, 0)
        self._end = start + rows
        self.offset += rows
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the view, as the last write did."""
        return self.keys, self.values

    def _range(self) -> tuple[int, int]:
        """Return the positions [first, stop) of the view at the offset."""
        stop = self._shape.shown(self.offset)
        return max(stop - self._shape.step - self.max_size, 0), stop

    def _lay_out(self, first: int, stop: int, keys: mx.array, values: mx.array) -> None:
        """Make the buffers hold the positions [first, stop)."""
        size, held_from = stop - first, self.offset - self._end
        if self.keys is not None and held_from == first:
            _fit(self, size)
            return
        begin = max(held_from, first)  # earlier positions have left the window
        kept = slice(begin - held_from, self._end)
        place = slice(begin - first, self.offset - first)
        made = []
        for old, new in ((self.keys, keys), (self.values, values)):
            batch, heads, _, dim = new.shape
            buffer = mx.zeros((batch, heads, size, dim), new.dtype)
            if old is not None:
                buffer[..., place, :] = old[..., kept, :]
            made.append(buffer)
        self.keys, self.values = made
        self._end = self.offset - first


FIXED: dict[type, Any] = {
    KVCache: FixedKVCache,
    QuantizedKVCache: FixedQuantizedKVCache,
    SlidingKVCache: FixedSlidingKVCache,
}


def in_fixed_view(cache: Any, shape: FixedShape) -> Any:
    """Return a fixed view, to pass to a model, of a live cache of a kind in `FIXED`."""
    shown = object.__new__(FIXED[type(cache)])
    shown.__dict__ = cache.__dict__
    shown._shape = shape
    return shown


def _fit(cache: Any, rows: int) -> None:
    arrays = buffers(cache)
    if arrays and arrays[0].shape[-2] != rows:
        both = (cache.keys, cache.values)
        cache.keys, cache.values = tree_map(lambda x: _resized(x, rows), both)


def _resized(buffer: mx.array, rows: int) -> mx.array:
    present = buffer.shape[-2]
    if present > rows:
        return mx.contiguous(buffer[..., :rows, :])
    return with_room(buffer, present, rows)
