"""Journal of `ConcatenateKVCache`, which makes new arrays with every write.

The journal keeps references to the old arrays, so old and new rows are both in memory
until the end of the round. `ConcatenateKVCache.trim` is not used: it lowers the offset
but keeps the rows, and the next write comes after these rows.
"""

from mlx_lm.models.cache import ConcatenateKVCache

from mlx_speculation.caches.journals.kv import KVJournal
from mlx_speculation.errors import UnsupportedCacheError


class ConcatenateJournal(KVJournal):
    """Journal of one `ConcatenateKVCache`; refuses a cache that was trimmed."""

    def __init__(self, cache: ConcatenateKVCache, whole: bool = False) -> None:
        rows = 0 if cache.keys is None else int(cache.keys.shape[-2])
        if cache.offset != rows:
            raise UnsupportedCacheError(
                f"A ConcatenateKVCache holds {rows} rows, but its offset is "
                f"{cache.offset}: its trim() lowers the offset but keeps the rows, and "
                f"the next write would come after them. Feed the first {cache.offset} "
                "tokens to a new KVCache."
            )
        super().__init__(cache)
        self._before = (cache.keys, cache.values)

    def commit(self, keep: int) -> None:
        """Cut off the rows after the kept ones, if the model wrote any."""
        if self.written > keep:
            cache = self._cache
            cache.offset = self._start + keep
            cache.keys = cache.keys[..., : cache.offset, :]
            cache.values = cache.values[..., : cache.offset, :]

    def rollback(self) -> None:
        """Put the old arrays back."""
        self._cache.keys, self._cache.values = self._before
        self._cache.offset = self._start
