"""Journal of `RotatingKVCache`, before and after the window has wrapped.

A row that is written alone sees the last `max_size` rows, whatever window the model
asks for. Several rows would see more where it asks for a larger one (plamo3 asks for
one row more). In a round each of them stands for a row written alone, so the mask is
cut to the window there. With `keep` above 0 a row written alone sees the first `keep`
rows and the last of the others, and several rows would lose sight of the first ones, so
in a round they get a mask of ours. A prompt, which is kept whole, gets the native mask.

A prefix of a write of several rows is kept by slicing off its tail: what mlx-lm
evicted before the write is then still not needed, because at least `max_size` - 1 older
rows and the first kept one remain. `RotatingKVCache.trim` is not used: after a wrap it
leaves rejected rows visible. How whole writes are undone is in `caches.journals.ring`.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mlx_speculation.caches.journals.live import ListenedTo
from mlx_speculation.caches.journals.ring import RingJournal


class PresentedRing(ListenedTo["RotatingJournal"], RotatingKVCache):
    """The live ring; its journal is called on every write, and no row sees too much."""

    __slots__ = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Note the state before the write, then write as the native ring does.

        Keys and values are [batch, heads, rows, dim], each with a dim of its own.
        """
        self.journal.note(keys, values)
        return super().update_and_fetch(keys, values)

    def make_mask(
        self,
        N: int,  # noqa: N803  models may name it
        window_size: int | None = None,
        return_array: bool = False,
    ) -> Any:
        """Return the native mask; in a round, one by which rows see as if alone."""
        if self.journal.whole:
            return super().make_mask(N, window_size, return_array)
        if window_size is not None:
            window_size = min(window_size, self.max_size)
        wraps = self.offset + N > self.max_size
        if self.keep and N > 1 and wraps and window_size in (None, self.max_size):
            return _mask_with_first_rows(self, N)
        return super().make_mask(N, window_size, return_array)


def _mask_with_first_rows(cache: Any, count: int) -> mx.array:
    """Return what `count` rows see: the first `keep` rows, and the last of the others.

    Returns:
        bool [count, columns], for the columns that a write of several rows leaves.
    """
    kept = min(cache.max_size - 1, cache.offset)
    columns = mx.arange(kept + count)[None]
    rows = mx.arange(kept, kept + count)[:, None]
    recent = rows < columns + cache.max_size - cache.keep
    seen: mx.array = (rows >= columns) & (recent | (columns < cache.keep))
    return seen


class RotatingJournal(RingJournal):
    """Journal of one `RotatingKVCache` with any `keep`; see `RingJournal`."""

    names = ("offset", "_idx")

    def __init__(self, cache: RotatingKVCache, whole: bool = False) -> None:
        super().__init__(cache, whole, PresentedRing)

    def commit(self, keep: int) -> None:
        """Undo whole writes from the end, then slice the tail of the last one."""
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
