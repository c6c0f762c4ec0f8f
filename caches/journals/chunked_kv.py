"""Journal of `ChunkedKVCache`, which drops its oldest rows when a chunk is full.

The buffer holds the rows [start_position, offset), and a prefix is kept by moving the
offset, as in a `KVCache`. Before each forward the model calls `maybe_trim_front`,
which drops the oldest rows until one chunk of rows is left:

    chunk of 4, opened at rows [3, 7)
    first forward: drops none, writes 3 rows    rows [3, 10)
    second forward: drops 3, writes 2 rows      rows [6, 12)
    commit(1)                                   rows [3, 8)
    rollback()                                  rows [3, 7)

A drop makes new arrays. The journal keeps the old ones, and puts them back to undo the
drop. `ChunkedKVCache.trim` is not used: it does not bring dropped rows back.
"""

from typing import Any

from mlx_lm.models.cache import ChunkedKVCache

from mlx_speculation.caches.journals.kv import KVJournal
from mlx_speculation.caches.journals.live import ListenedTo, listened_to_by


class PresentedChunk(ListenedTo["ChunkedJournal"], ChunkedKVCache):
    """View of the live cache; calls its journal before rows are dropped."""

    __slots__ = ()

    def maybe_trim_front(self) -> None:
        """Record the state if rows will be dropped, then drop them as mlx-lm does."""
        self.journal.note()
        super().maybe_trim_front()


class ChunkedJournal(KVJournal):
    """Journal of one `ChunkedKVCache`."""

    def __init__(self, cache: ChunkedKVCache, whole: bool = False) -> None:
        super().__init__(cache)
        # The fields before each drop of old rows.
        self._trims: list[dict[str, Any]] = []
        self.presented = listened_to_by(self, PresentedChunk, cache)

    def note(self) -> None:
        """Record the state if a trim of the front will drop rows."""
        cache = self._cache
        kept = cache.offset - cache.start_position
        if cache.keys is not None and kept > cache.chunk_size:
            self._trims.append(dict(vars(cache)))

    def commit(self, keep: int) -> None:
        """Undo the trims that came after the kept rows, and move the offset back."""
        if self.written:
            self._undo_trims(self._start + keep)
            super().commit(keep)

    def rollback(self) -> None:
        """Undo every trim; then as in `KVJournal`."""
        self._undo_trims(self._start)
        super().rollback()

    def _undo_trims(self, end: int) -> None:
        """Undo the trims that came at offset `end` or later, the last one first."""
        while self._trims and self._trims[-1]["offset"] >= end:
            vars(self._cache).update(self._trims[-1])
            self._trims.pop()  # after the undo, so that an interrupted one is repeated
