"""Journal of `KVCache` and `QuantizedKVCache`: setting the offset keeps a prefix.

    opened at offset 5, the model writes 3 rows     rows [0, 8), offset 8
    commit(1)                                       rows [0, 6), offset 6
    rollback()                                      rows [0, 5), offset 5

Rows at and past the offset are never read, and later writes overwrite them, so nothing
is copied. The journal makes no second array that shares a buffer: with one, the next
write would copy the whole buffer. Quantized rows too are on axis -2, and each row is
quantized alone.
"""

from collections.abc import Sequence
from typing import Any

from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache

from mlx_speculation.caches.journals.live import LiveJournal
from mlx_speculation.caches.types.fixed_view import FixedShape, in_fixed_view
from mlx_speculation.caches.types.padded_kv import KeySteps, in_steps


class KVJournal(LiveJournal):
    """Journal of one cache whose length is its offset.

    The model sees the live cache itself. With `steps` it sees a padded view, if the
    cache is a `KVCache`; with `shape`, a fixed view. `whole`, which all journals take,
    changes nothing here.
    """

    __slots__ = ("_cache", "_start", "_was_empty", "presented")

    def __init__(
        self,
        cache: Any,  # its rows are [0, offset)
        whole: bool = False,
        steps: KeySteps | None = None,
        shape: FixedShape | None = None,
    ) -> None:
        self._cache = cache
        self.presented = cache
        if shape is not None:
            self.presented = in_fixed_view(cache, shape)
        elif steps is not None and isinstance(cache, KVCache):
            self.presented = in_steps(cache, steps)
        self._start = cache.offset
        self._was_empty = cache.keys is None

    @classmethod
    def since(cls, cache: KVCache, start: int, was_empty: bool) -> "KVJournal":
        """Return a journal as if it had been opened at offset `start`."""
        journal = cls(cache)
        journal._start, journal._was_empty = start, was_empty
        return journal

    @property
    def written(self) -> int:
        """Rows appended since the journal was opened."""
        return int(self._cache.offset - self._start)

    def commit(self, keep: int) -> None:
        """Move the offset to the end of the kept rows, if the model wrote any."""
        if self.written:
            self._cache.offset = self._start + keep

    def rollback(self) -> None:
        """Move the offset back; empty the cache again if it was empty."""
        cache = self._cache
        cache.offset = self._start
        if self._was_empty:
            cache.keys = cache.values = None
        elif cache.keys is not None:
            even_out(cache)


class KVJournals:
    """The journals of a model with `KVCache`s only; they are made when one is needed.

    If all layers wrote the same number of rows, moving the offsets keeps a prefix
    without any journal. Making a journal for every layer would slow down a small
    model's step on a GPU by 0.5 %.
    """

    __slots__ = ("_caches", "_empty", "_starts", "start")

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._caches = caches
        self._starts: list[int] = []
        self._empty: list[bool] = []
        for cache in caches:  # a comprehension would cost a call
            self._starts.append(cache.offset)
            self._empty.append(cache.keys is None)
        self.start = max(self._starts)  # the largest offset when the round began

    @classmethod
    def of(cls, caches: Sequence[Any]) -> "KVJournals | None":
        """Return the journals; None if a cache is of another kind or occurs twice."""
        kinds, places = set(map(type, caches)), set(map(id, caches))
        return (
            cls(caches) if kinds == {KVCache} and len(places) == len(caches) else None
        )

    def wrote(self) -> int | None:
        """Return how many rows every layer wrote; None: the layers differ."""
        count = int(self._caches[0].offset) - self._starts[0]
        for cache, start in zip(self._caches, self._starts, strict=True):
            if cache.offset - start != count:
                return None
        return count

    def commit(self, keep: int) -> None:
        """Keep the first `keep` rows written in every layer."""
        for cache, start in zip(self._caches, self._starts, strict=True):
            cache.offset = start + keep

    def opened(self) -> list[KVJournal]:
        """Return a journal for each cache, as if opened when this object was made."""
        states = zip(self._caches, self._starts, self._empty, strict=True)
        return [KVJournal.since(cache, start, empty) for cache, start, empty in states]


def even_out(cache: Any) -> None:
    """Cut all buffers to the rows of the shortest one; rows are on axis -2."""
    buffers: Any = tree_flatten((cache.keys, cache.values))
    lengths = {buffer.shape[-2] for _, buffer in buffers}
    if len(lengths) > 1:  # buffers grow one by one, and an interruption came between
        rows = min(lengths)
        cache.keys = tree_map(lambda buffer: buffer[..., :rows, :], cache.keys)
        cache.values = tree_map(lambda buffer: buffer[..., :rows, :], cache.values)
