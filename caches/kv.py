"""Journal of `KVCache`: a prefix is kept by moving the offset.

    opened at offset 5, the model writes 3 rows     rows [0, 8), offset 8
    commit(1)                                       rows [0, 6), offset 6
    rollback()                                      rows [0, 5), offset 5

Rows at and past the offset are never read and are overwritten by the next write, so
nothing is copied. A second reference to the buffer would make the next write copy
all of it; the journal holds none.
"""

from typing import Any

from mlx_lm.models.cache import KVCache


class KVJournal:
    """Journal of one `KVCache`; the live cache itself is what the model sees."""

    __slots__ = ("_cache", "_start", "_was_empty")
    live = True

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._start = cache.offset
        self._was_empty = cache.keys is None

    @property
    def presented(self) -> KVCache:
        """The live cache."""
        return self._cache

    @property
    def written(self) -> int:
        """Rows appended since the journal was opened."""
        return int(self._cache.offset - self._start)

    def prepare(self, keep: int) -> None:
        """Nothing can fail."""

    def commit(self, keep: int) -> None:
        """Move the offset to the end of the kept rows; 0 if the model wrote none."""
        if keep == 0:
            self.rollback()
        elif self.written:
            self._cache.offset = self._start + keep

    def rollback(self) -> None:
        """Move the offset back; an empty cache becomes empty again."""
        cache: Any = self._cache
        cache.offset = self._start
        if self._was_empty:
            cache.keys = None
            cache.values = None
        elif cache.keys is not None and cache.keys.shape[2] != cache.values.shape[2]:
            # Interrupted while the buffers grew, one after the other.
            rows = min(cache.keys.shape[2], cache.values.shape[2])
            cache.keys = cache.keys[..., :rows, :]
            cache.values = cache.values[..., :rows, :]
