"""A sliding window that is contiguous and in order, with slack behind it.

`SlidingKVCache` takes the place of a `RotatingKVCache` with `keep=0`. Its buffer has
room for the window and `slack` rows more. Rows stand in the order of their positions,
and a write goes in place behind the last one:

    max_size 4, slack 3; rows are named by their position, . is free
    held              2 3 4 5 6 . .      offset 7
    a write of 1      2 3 4 5 6 7 .      shows [4, 8), all that position 7 may see
    a write of 2      5 6 7 8 9 . .      full: the last rows move into a new buffer
                                         first; shows [5, 10), the mask does the rest
    the last 2 undone 5 6 7 . . . .      two indices move

So a round copies nothing but its own rows, and undoing it copies nothing at all. One
row sees exactly what is shown, so it needs no mask. The price: `slack` more rows of
memory, and one copy of the window in about `slack` rows written.

The rows [0, `_end`) of the buffers hold the positions [offset - `_end`, offset), and
[`_first`, `_end`) is shown. At least the last `max_size` of them are always held.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation.errors import InvalidRequestError

LEAST_SLACK = 1024

State = tuple[mx.array | None, mx.array | None, int, int, int, int, int]


def default_slack(max_size: int) -> int:
    """Return the slack for a window: as much again, and 1024 at least.

    At most one row is then copied for each one written, against `max_size` rows that
    attention reads for it.
    """
    return max(LEAST_SLACK, max_size)


class SlidingKVCache:
    """The last `max_size` rows of keys and values, in order.

    For models it is a `RotatingKVCache`: same offset, same masks for several rows,
    same visible rows. What differs is their order after one-row writes to a full
    ring, so that outputs differ by rounding.

    Args:
        max_size: rows of the window, from 1.
        slack: rows of the buffer beyond it, from 1; `default_slack` when omitted.

    Raises:
        InvalidRequestError: one of them is less than 1.
    """

    keep = 0  # rows that never leave; a ring that has some cannot be replaced
    step = 256  # rows that the buffer grows by, until it has room for the window

    def __init__(self, max_size: int, slack: int | None = None) -> None:
        slack = default_slack(max_size) if slack is None else slack
        if max_size < 1 or slack < 1:
            raise InvalidRequestError(
                f"max_size is {max_size} and slack is {slack}. Both are counts of "
                "rows, from 1."
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
        """Return a cache that holds what `native` does; that one stays as it is.

        It costs one copy of the window, at the next evaluation.

        Raises:
            InvalidRequestError: it is no ring, keeps its first rows, or lacks some.
        """
        ring: Any = native
        if type(native) is not RotatingKVCache or ring.keep != 0:
            kept = getattr(ring, "keep", None)
            raise InvalidRequestError(
                f"A {type(native).__name__} with keep={kept} was given, and a "
                "RotatingKVCache with keep=0 is needed. Leave others as they are."
            )
        cache = cls(ring.max_size, slack)
        if ring.keys is None or ring.offset == 0:
            return cache
        keys, values = map(ring._temporal_order, (ring.keys, ring.values))
        rows = min(ring.offset, ring.max_size)
        if keys.shape[2] < rows:
            raise InvalidRequestError(
                f"The ring holds {keys.shape[2]} rows at offset {ring.offset}, and "
                f"{rows} belong there: it was cut. Feed its tokens to a new one."
            )
        cache._append(keys[..., -rows:, :], values[..., -rows:, :], undo=0)
        cache.offset = ring.offset
        return cache

    def to_native(self) -> RotatingKVCache:
        """Return a ring with the same window; this cache stays as it is."""
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
        """Append rows; return them behind the `max_size` - 1 rows before them.

        Args:
            keys: [batch, heads, rows, key dim].
            values: [batch, heads, rows, value dim].
        """
        return self._append(keys, values, undo=0)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last write showed, less what was undone since."""
        shown = slice(self._first, self._end)
        return self.keys[..., shown, :], self.values[..., shown, :]

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        """Return the mask for the next `n` rows.

        One row sees all that is shown: None. Only a model whose window is smaller
        than `max_size` gets an array there; mlx-lm has none.
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
        """Return how many rows of the window are filled."""
        return min(self.offset, self.max_size)

    def empty(self) -> bool:
        """Return whether nothing was ever written."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, slack included."""
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)

    def can_trim(self, n: int) -> bool:
        """Return whether the window before the last `n` rows is still held."""
        return 0 <= n <= self.offset and self._held_without(n)

    def is_trimmable(self) -> bool:
        """Return whether any number of rows can be trimmed: none has left it yet."""
        return self._end == self.offset

    def trim(self, n: int) -> int:
        """Take back the last `n` rows, or all; return how many.

        Raises:
            InvalidRequestError: rows of the window then have left; nothing changed.
        """
        n = min(n, self.offset)
        if not self.can_trim(n):
            raise InvalidRequestError(
                f"trim({n}) was asked of a sliding cache at offset {self.offset}, "
                f"which holds its last {self._end} rows, and {self.max_size} have to "
                "remain. Ask can_trim first, and feed the tokens again where it denies."
            )
        self._drop(n)
        return n

    @property
    def state(self) -> State:
        """All it holds, as mlx-lm's caches give it: arrays and plain numbers."""
        sizes = self.max_size, self.slack
        return self.keys, self.values, self.offset, *sizes, self._first, self._end

    @state.setter
    def state(self, state: State) -> None:
        self.keys, self.values, self.offset, *rest = state
        self.max_size, self.slack, self._first, self._end = rest

    @classmethod
    def from_state(cls, state: State) -> "SlidingKVCache":
        """Return a cache with this state."""
        cache = object.__new__(cls)
        cache.state = state
        return cache

    def __copy__(self) -> "SlidingKVCache":
        """Return a cache of its own: what one of the two writes, the other lacks.

        The next write to either copies the buffers.
        """
        keys, values, *rest = self.state
        copies = (None if a is None else a[...] for a in (keys, values))
        return SlidingKVCache.from_state((*copies, *rest))  # type: ignore[arg-type]

    def _append(
        self, keys: mx.array, values: mx.array, undo: int
    ) -> tuple[mx.array, mx.array]:
        """Append rows; the last `undo` rows before them can still be dropped."""
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
        """Take new buffers with room for the rows, and move what has to stay there."""
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
        """Return how many rows a new buffer gets that has to take `rows`."""
        limit = self.max_size + self.slack
        grown = -(-rows // self.step) * self.step
        return max(rows, limit if rows > self.max_size else min(grown, limit))

    def _held_without(self, n: int) -> bool:
        return self._end - n >= min(self.offset - n, self.max_size)

    def _drop(self, n: int) -> None:
        """Take back the last `n` rows, for which `can_trim` holds."""
        self.offset -= n
        self._end -= n
        last = self._end - self.max_size
        if self._first > last:
            self._first = last if last > 0 else 0


def _buffer(rows: mx.array, size: int, *, filled: bool = False) -> mx.array:
    """Return a buffer of `size` rows, of their shape; `filled` with them in front.

    A fill and a write in place cost half of a concatenation with zeros.
    """
    batch, heads, count, dim = rows.shape
    buffer = mx.zeros((batch, heads, size, dim), rows.dtype)
    if filled:
        buffer[..., :count, :] = rows
    return buffer
