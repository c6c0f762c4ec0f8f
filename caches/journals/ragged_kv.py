"""Journal of ragged batches, plain and quantized: setting the lengths keeps a prefix.

Nothing is copied; positions past a row's length are overwritten later.
"""

from operator import add

from mlx_speculation.caches.journal import Keep
from mlx_speculation.caches.journals.live import LiveJournal
from mlx_speculation.caches.types.ragged_kv import RaggedKVCache


class RaggedJournal(LiveJournal):
    """Journal of one ragged cache; the model sees the live cache itself."""

    def __init__(self, cache: RaggedKVCache, whole: bool = False) -> None:
        self.presented = self._cache = cache
        self._lengths = cache.lengths
        self._was_empty = cache.keys is None

    @property
    def rows(self) -> int:
        """Number of sequences in the batch."""
        return len(self._lengths)

    @property
    def written(self) -> int:
        """Positions appended to every row since the journal was opened."""
        return int(self._cache.lengths[0] - self._lengths[0])

    def commit(self, keep: Keep) -> None:
        """Set every row's length."""
        if self._cache.lengths is not self._lengths:  # the model has written
            each = [keep] * self.rows if isinstance(keep, int) else keep
            self._cache.lengths = [*map(add, self._lengths, each)]

    def rollback(self) -> None:
        """Restore the lengths; empty the cache again if it was empty."""
        self._cache.lengths = self._lengths
        if self._was_empty:
            self._cache.keys = self._cache.values = None
