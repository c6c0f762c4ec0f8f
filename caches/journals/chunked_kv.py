"""Journal of `ChunkedKVCache`, whose oldest rows go where a chunk is full.

The buffer holds the rows [start_position, offset), and a prefix is kept by moving the
offset, as in a `KVCache`. Before each forward the model calls `maybe_trim_front`,
which drops the rows that the chunk has outgrown:

    chunk of 4, opened at rows [3, 7)
    first forward: nothing to drop, 3 rows      rows [3, 10)
    second forward: drops 3, writes 2 rows      rows [6, 12)
    commit(1)                                   rows [3, 8)
    rollback()                                  rows [3, 7)

A drop replaces the arrays and writes never reach the old ones again, so those are
noted before it and put back where it has to be undone. The price: a full chunk is
held twice to the end of the round. `ChunkedKVCache.trim` is not used: it knows
nothing of the rows dropped between two forwards.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from mlx_speculation.caches.journals.kv import even_out
from mlx_speculation.caches.journals.write_listener import ListenedTo, listened_to_by


@dataclass(frozen=True, slots=True)
class FrontTrim:
    """The state of the cache before old rows were dropped."""

    offset: int
    start_position: int
    keys: mx.array
    values: mx.array


class PresentedChunk(ListenedTo["ChunkedJournal"], ChunkedKVCache):
    """The live cache, whose journal is called when rows are dropped."""

    __slots__ = ()

    def maybe_trim_front(self) -> None:
        """Note the state if rows are about to go, then drop them as natively."""
        self.journal.note()
        super().maybe_trim_front()


class ChunkedJournal:
    """Journal of one `ChunkedKVCache`."""

    live = True

    def __init__(self, cache: ChunkedKVCache) -> None:
        self._cache = cache
        self._start = cache.offset
        self._was_empty = cache.keys is None
        self._trims: list[FrontTrim] = []
        self._presented = listened_to_by(self, PresentedChunk, cache)

    @property
    def presented(self) -> ChunkedKVCache:
        """The live cache, seen through `PresentedChunk`."""
        shown: ChunkedKVCache = self._presented
        return shown

    @property
    def written(self) -> int:
        """Rows appended since the journal was opened."""
        return int(self._cache.offset - self._start)

    def note(self) -> None:
        """Record the state before a trim of the front, if there will be one."""
        cache: Any = self._cache
        held = cache.offset - cache.start_position
        if cache.keys is not None and held > cache.chunk_size:
            trim = FrontTrim(
                cache.offset, cache.start_position, cache.keys, cache.values
            )
            self._trims.append(trim)

    def prepare(self, keep: int) -> None:
        """Nothing can fail."""

    def commit(self, keep: int) -> None:
        """Undo the trims past the kept rows, then move the offset to their end."""
        if keep == 0:
            self.rollback()
        elif self.written:
            end = self._start + keep
            self._undo_trims(end)
            self._cache.offset = end

    def rollback(self) -> None:
        """Undo every trim and move the offset back; an empty cache is so again."""
        cache: Any = self._cache
        self._undo_trims(self._start)
        cache.offset = self._start
        if self._was_empty:
            cache.keys = None
            cache.values = None
        elif cache.keys is not None:
            even_out(cache)

    def _undo_trims(self, end: int) -> None:
        """Undo the trims that came at offset `end` or later, the last one first."""
        cache: Any = self._cache
        while self._trims and self._trims[-1].offset >= end:
            trim = self._trims[-1]
            cache.start_position = trim.start_position
            cache.keys, cache.values = trim.keys, trim.values
            self._trims.pop()  # last: an interrupted undo is done again
