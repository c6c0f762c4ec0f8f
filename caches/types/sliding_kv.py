"""A sliding window of rows, contiguous and in order, followed by slack.

`SlidingKVCache` replaces a `RotatingKVCache` with `keep=0`. Its buffer has room for the
window and for `slack` more rows. Each write goes in place after the last row:

    max_size 4, slack 3; rows are named by their position, . is free
    before            2 3 4 5 6 . .      offset 7
    a write of 1      2 3 4 5 6 7 .      returns [4, 8), all that position 7 sees
    a write of 2      4 5 6 7 8 9 .      full: the window first moves into a new
                                         buffer; returns [5, 10), to be masked
    the last 2 undone 4 5 6 7 . . .      only indices move

So undoing a round copies nothing, and a write of one row needs no mask. In return, the
cache copies its window once in about `slack` rows.

The rows [0, `_end`) of the buffers hold the positions [offset - `_end`, offset), among
them always the last `max_size`. `keys_and_values` returns the rows [`_first`, `_end`).
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation.errors import InvalidRequestError

LEAST_SLACK = 1024

State = tuple[mx.array | None, mx.array | None, int, int, int, int, int]


def default_slack(max_size: int) -> int:
    """Return the slack for a window: as many rows as the window, and at least 1024."""
    # At most one row is then copied for each row written.
    return max(LEAST_SLACK, max_size)


class SlidingKVCache:
    """The last `max_size` rows of keys and values [batch, heads, rows, dim], in order.

    For a model it is like a `RotatingKVCache` (a ring): the offset, the masks for
    several rows and the visible rows are the same. After one-row writes to a full ring
    the order of the rows differs, so outputs differ by rounding.

    Args:
        max_size: rows of the window, at least 1.
        slack: further rows of the buffer, at least 1. None: `default_slack`.

    Raises:
        InvalidRequestError: `max_size` or `slack` is less than 1.
    """

    keep = 0  # as in a ring: how many of the first rows are never evicted
    step = 256  # the buffer grows by this many rows, until it has room for the window

    def __init__(self, max_size: int, slack: int | None = None) -> None:
        slack = default_slack(max_size) if slack is None else slack
        if max_size < 1 or slack < 1:
            raise InvalidRequestError(
                f"max_size is {max_size} and slack is {slack}. Both have to be at "
                "least 1 row."
            )
        self.max_size = max_size
        self.slack = slack
        self.offset = 0
        self.keys: Any = None
        self.values: Any = None
        self._first = 0
        self._end = 0

    @classmethod
    def from_native(
        cls, native: RotatingKVCache, slack: int | None = None
    ) -> "SlidingKVCache":
        """Return a cache with a copy of the rows of `native`; `native` does not change.

        Raises:
            InvalidRequestError: `native` is of another class, has `keep` above 0, or
                lacks rows.
        """
        ring: Any = native
        if type(native) is not RotatingKVCache or ring.keep != 0:
            kept = getattr(ring, "keep", None)
            raise InvalidRequestError(
                f"A {type(native).__name__} with keep={kept} cannot be converted, only "
                "a RotatingKVCache with keep=0. Leave other caches as they are."
            )
        cache = cls(ring.max_size, slack)
        if ring.keys is None or ring.offset == 0:
            return cache
        keys, values = map(ring._temporal_order, (ring.keys, ring.values))
        rows = min(ring.offset, ring.max_size)
        if keys.shape[2] < rows:
            raise InvalidRequestError(
                f"The ring holds {keys.shape[2]} rows at offset {ring.offset}, but "
                f"{rows} belong there: it was cut. Feed its tokens to a new one."
            )
        cache._append(keys[..., -rows:, :], values[..., -rows:, :], undo=0)
        cache.offset = ring.offset
        return cache

    def to_native(self) -> RotatingKVCache:
        """Return a ring with the same window; this cache does not change."""
        ring: Any = RotatingKVCache(max_size=self.max_size)
        if self.offset > 0:
            rows = slice(self._end - min(self.offset, self.max_size), self._end)
            ring.keys = mx.contiguous(self.keys[..., rows, :])
            ring.values = mx.contiguous(self.values[..., rows, :])
            ring.offset, ring._idx = self.offset, ring.keys.shape[2]
        return ring  # type: ignore[no-any-return]

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append rows; return up to `max_size` - 1 earlier rows, then the new rows."""
        return self._append(keys, values, undo=0)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the rows that the last write returned.

        After an undo, these are at least the last `max_size` rows, or all.
        """
        shown = slice(self._first, self._end)
        return self.keys[..., shown, :], self.values[..., shown, :]

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        """Return the mask for the next `n` rows.

        One row sees all rows that a write returns, so its mask is None,
        unless `window_size` is below `max_size`; mlx-lm has no such model.
        """
        before = min(self.offset, self.max_size - 1)
        if n > 1:
            window = window_size or self.max_size
            if return_array or before + n > window:
                return create_causal_mask(n, before, window_size=window)
            return "causal"
        if window_size is None or window_size > before:
            return None
        return mx.arange(before + 1) > before - window_size

    def size(self) -> int:
        """Return the number of filled rows of the window."""
        return min(self.offset, self.max_size)

    def empty(self) -> bool:
        """Return whether nothing was ever written."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, slack included."""
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)

    def is_trimmable(self) -> bool:
        """Return whether no row was evicted yet, so `trim` can drop any number."""
        return self._end == self.offset

    def trim(self, n: int) -> int:
        """Drop the last `n` rows, or all if there are fewer; return the number dropped.

        Raises:
            InvalidRequestError: rows that would return into the window were evicted.
        """
        n = min(n, self.offset)
        if n < 0 or self._end - n < min(self.offset - n, self.max_size):
            raise InvalidRequestError(
                f"A sliding cache at offset {self.offset} cannot do trim({n}): it "
                f"holds the last {self._end} rows, and {self.max_size} have to remain. "
                "Feed the tokens again."
            )
        self._drop(n)
        return n

    @property
    def state(self) -> State:
        """Arrays and plain numbers of the cache, as mlx-lm's caches return them."""
        sizes = self.max_size, self.slack
        return self.keys, self.values, self.offset, *sizes, self._first, self._end

    def _append(
        self, keys: mx.array, values: mx.array, undo: int
    ) -> tuple[mx.array, mx.array]:
        """Append rows so that the `undo` rows before them can still be dropped."""
        width = keys.shape[2]
        if self.keys is None or self._end + width > self.keys.shape[2]:
            self._make_room(keys, values, undo)
        end = self._end
        stop = end + width
        self.keys[..., end:stop, :] = keys
        self.values[..., end:stop, :] = values
        first = end - self.max_size + 1
        self._first = first = first if first > 0 else 0
        self._end = stop
        self.offset += width
        return self.keys[..., first:stop, :], self.values[..., first:stop, :]

    def _make_room(self, keys: mx.array, values: mx.array, undo: int) -> None:
        """Make new buffers with room for the rows; copy the old rows still needed."""
        width, end = keys.shape[2], self._end
        if self.keys is None:
            size = self._size_for(width)
            self.keys, self.values = (_buffer(rows, size) for rows in (keys, values))
            return
        fits = end + width <= self.max_size + self.slack
        kept = end if fits else min(end, self.max_size + undo)
        size, rows = self._size_for(kept + width), slice(end - kept, end)
        window = self.keys[..., rows, :], self.values[..., rows, :]
        self.keys, self.values = (_buffer(part, size, filled=True) for part in window)
        self._end = kept

    def _size_for(self, rows: int) -> int:
        """Return the size of a new buffer with room for at least `rows` rows."""
        limit = self.max_size + self.slack
        grown = -(-rows // self.step) * self.step
        return max(rows, limit if rows > self.max_size else min(grown, limit))

    def _drop(self, n: int) -> None:
        """Drop the last `n` rows; the window before them has to be complete."""
        self.offset -= n
        self._end -= n
        last = self._end - self.max_size
        if self._first > last:
            self._first = last if last > 0 else 0


def _buffer(rows: mx.array, size: int, *, filled: bool = False) -> mx.array:
    """Return a buffer of `size` zero rows; with `filled`, it begins with `rows`."""
    batch, heads, count, dim = rows.shape
    buffer = mx.zeros((batch, heads, size, dim), rows.dtype)
    if filled:  # half the cost of a concatenation with zeros
        buffer[..., :count, :] = rows
    return buffer
