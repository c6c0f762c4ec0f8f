"""Journal of `KVCache`: a prefix is kept by moving the offset.

    opened at offset 5, the model writes 3 rows     rows [0, 8), offset 8
    commit(1)                                       rows [0, 6), offset 6
    rollback()                                      rows [0, 5), offset 5

Rows at and past the offset are never read and are overwritten by the next write, so
nothing is copied. A second reference to the buffer would make the next write copy
all of it; the journal holds none.
"""

from mlx_lm.models.cache import KVCache


class KVJournal:
    """Journal of one `KVCache`; the live cache itself is what the model sees."""

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

    def can_keep(self, keep: int) -> bool:
        """Any prefix can be kept."""
        return True

    def prepare(self, keep: int) -> None:
        """Nothing can fail."""

    def commit(self, keep: int) -> None:
        """Move the offset to the end of the kept rows."""
        if keep == 0:
            self.rollback()
        else:
            self._cache.offset = self._start + keep

    def rollback(self) -> None:
        """Move the offset back; an empty cache becomes empty again."""
        self._cache.offset = self._start
        if self._was_empty:
            self._cache.keys = None
            self._cache.values = None
