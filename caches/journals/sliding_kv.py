"""Journal of `SlidingKVCache`: a prefix is kept by moving two indices.

    opened at offset 7, the model writes 3 rows     offset 10
    commit(1)                                       offset 8
    rollback()                                      offset 7

If the buffers lack room, a write makes new ones, and copies into them all rows of the
open round and the whole window before the round. So any prefix can still be kept, and a
rollback puts the old buffers back. The journal makes no second array that shares a
buffer: with one, the next write would copy the whole buffer.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.caches.journals.live import LiveJournal, sharing
from mlx_speculation.caches.types.fixed_view import FixedShape, in_fixed_view
from mlx_speculation.caches.types.padded_kv import (
    KeySteps,
    asks_cudnn,
    shown_in_steps,
    stepped_mask,
    whole_steps,
)
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache


class PresentedSliding(SlidingKVCache):
    """A view of the live cache that keeps the rows needed to undo the round.

    With `steps`, a window that is not full yet is padded to whole steps of rows.
    """

    __slots__ = ("_start", "_steps", "_whole")
    _start: int
    _steps: KeySteps | None
    _whole: bool

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append rows, and keep what is needed to undo the whole round."""
        shown = self._append(keys, values, undo=self.offset - self._start)
        return shown_in_steps(self) if self._in_steps else shown

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the last write returned, without the rows undone since."""
        return shown_in_steps(self) if self._in_steps else super().keys_and_values()

    def make_mask(
        self, n: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        """Return the mask; unless `whole`, its window is at most `max_size`."""
        if window_size is not None and not self._whole:
            window_size = min(window_size, self.max_size)
        if self._steps is not None:
            self._steps.ends.pop(self.max_size, None)
            if n > 1 and self._takes_steps(n):
                self._steps.ends[self.max_size] = self.offset + n
                return stepped_mask(n, self.offset, window_size or self.max_size)
        return super().make_mask(n, window_size, return_array)

    @property
    def _in_steps(self) -> bool:
        ends = None if self._steps is None else self._steps.ends
        return ends is not None and ends.get(self.max_size) == self.offset

    def _takes_steps(self, n: int) -> bool:
        """Return whether cuDNN is used, the window is not full, and padding fits."""
        return (
            self.keys is not None
            and asks_cudnn(self.keys.dtype)
            and self._end == self.offset < self.max_size
            and whole_steps(self.offset + n) <= self.max_size + self.slack
        )


class SlidingJournal(LiveJournal):
    """Journal of one `SlidingKVCache`; `whole`: a commit will keep all rows."""

    def __init__(
        self,
        cache: SlidingKVCache,
        whole: bool = False,
        steps: KeySteps | None = None,
        shape: FixedShape | None = None,
    ) -> None:
        self._cache = cache
        self._before = dict(vars(cache))
        if shape is not None:
            self.presented = in_fixed_view(cache, shape)
            return
        self.presented = sharing(cache, PresentedSliding)
        self.presented._start = cache.offset
        self.presented._whole = whole
        self.presented._steps = steps

    @property
    def written(self) -> int:
        """Rows appended since the journal was opened."""
        return self._cache.offset - int(self._before["offset"])

    def commit(self, keep: int) -> None:
        """Drop the rows after the kept ones, if the model wrote any."""
        excess = self.written - keep
        if excess > 0:
            self._cache._drop(excess)

    def rollback(self) -> None:
        """Put back the buffers and the indices; nothing is copied."""
        vars(self._cache).update(self._before)
