"""Journal of `RotatingKVCache`, before and after the window has wrapped.

In a round, each row of a write has to see the same rows as if it were written alone.
mlx-lm's mask breaks this in two cases, in which a round gets another mask:

- The model asks for a window larger than `max_size` (plamo3 asks for one row more). A
  row written alone sees only the last `max_size` rows. Rows written together would see
  more.
- `keep` is above 0. A row written alone sees the first `keep` rows and the newest of
  the rest. In a write of several rows, only the first one would see all `keep` rows.

A write that is kept as a whole or not at all (`whole`), such as a chunk of a prompt,
gets mlx-lm's mask.

To keep a prefix of a write of several rows, the journal slices off the tail. No row
that mlx-lm evicted is needed: mlx-lm keeps `max_size` - 1 older rows, and the first
written row sees no more. `RotatingKVCache.trim` is not used: it leaves rejected rows
visible after a wrap.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation.caches.journals.live import ListenedTo
from mlx_speculation.caches.journals.ring import RingJournal


class PresentedRing(ListenedTo["RotatingJournal"], RotatingKVCache):
    """View of the live ring with a round's mask; calls its journal at every write."""

    __slots__ = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Record the state before the write, then write as mlx-lm does."""
        self.journal.note(keys, values)
        return super().update_and_fetch(keys, values)

    def make_mask(
        self,
        N: int,  # noqa: N803  some models pass it by name
        window_size: int | None = None,
        return_array: bool = False,
    ) -> Any:
        """Return mlx-lm's mask; in a round, rows see the same as if written alone."""
        if self.journal.whole:
            return super().make_mask(N, window_size, return_array)
        if window_size is not None:
            window_size = min(window_size, self.max_size)
        wraps = self.offset + N > self.max_size
        if self.keep and N > 1 and wraps and window_size in (None, self.max_size):
            return _mask_with_first_rows(self, N)
        return super().make_mask(N, window_size, return_array)


def _mask_with_first_rows(cache: Any, count: int) -> mx.array:
    """Return a mask that shows the first `keep` rows and the newest of the rest."""
    kept = min(cache.max_size - 1, cache.offset)
    columns = mx.arange(kept + count)[None]
    rows = mx.arange(kept, kept + count)[:, None]
    recent = rows < columns + cache.max_size - cache.keep
    # bool [count, columns], with a column for each row that the write returns
    seen: mx.array = (rows >= columns) & (recent | (columns < cache.keep))
    return seen


class RotatingJournal(RingJournal):
    """Journal of one `RotatingKVCache` with any `keep`."""

    names = ("offset", "_idx")

    def __init__(self, cache: RotatingKVCache, whole: bool = False) -> None:
        super().__init__(cache, whole, PresentedRing)

    def commit(self, keep: int) -> None:
        """Undo whole writes from the end, then cut the tail off the last one left."""
        excess = self.written - keep
        while excess > 0 and excess >= self._writes[-1].width:
            excess -= self._writes[-1].width
            self._undo_last()
        if excess > 0:
            self._slice_tail(excess)

    def _slice_tail(self, rows: int) -> None:
        cache = self._cache
        stop = cache._idx - rows
        cache.keys = cache.keys[..., :stop, :]
        cache.values = cache.values[..., :stop, :]
        cache._idx = stop
        cache.offset -= rows
