"""Registry of cache kinds and their journals.

A `CacheList` has no journal; each of its members has one. The class of a cache has to
be in the registry itself: a subclass can write in a way that its base class's journal
does not record, so subclasses are refused like unknown kinds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from mlx_speculation.caches.journal import Journal
from mlx_speculation.caches.journals.arrays import ArraysJournal
from mlx_speculation.caches.journals.batch_kv import BatchKVJournal
from mlx_speculation.caches.journals.batch_rotating_kv import BatchRotatingJournal
from mlx_speculation.caches.journals.chunked_kv import ChunkedJournal
from mlx_speculation.caches.journals.concatenate_kv import ConcatenateJournal
from mlx_speculation.caches.journals.deepseek_v41 import LayerJournal
from mlx_speculation.caches.journals.isolated import isolate
from mlx_speculation.caches.journals.kv import KVJournal
from mlx_speculation.caches.journals.ragged_kv import RaggedJournal
from mlx_speculation.caches.journals.rotating_kv import RotatingJournal
from mlx_speculation.caches.journals.sliding_kv import SlidingJournal
from mlx_speculation.caches.types.fixed_view import FIXED, FixedShape
from mlx_speculation.caches.types.leaves import checked_leaves, flat
from mlx_speculation.caches.types.padded_kv import KeySteps
from mlx_speculation.caches.types.ragged_kv import RaggedKVCache
from mlx_speculation.caches.types.ragged_quantized_kv import RaggedQuantizedKVCache
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache

# Called with a cache and `whole`, perhaps also `steps`; or with a cache and `shape`.
JOURNALS: dict[type, Callable[..., Journal]] = {
    KVCache: KVJournal,
    QuantizedKVCache: KVJournal,
    ConcatenateKVCache: ConcatenateJournal,
    ChunkedKVCache: ChunkedJournal,
    RotatingKVCache: RotatingJournal,
    ArraysCache: ArraysJournal,
    LayerCache: LayerJournal,
    BatchKVCache: BatchKVJournal,
    BatchRotatingKVCache: BatchRotatingJournal,
    SlidingKVCache: SlidingJournal,
    RaggedKVCache: RaggedJournal,
    RaggedQuantizedKVCache: RaggedJournal,
}
KNOWN = (*JOURNALS, CacheList)


def check_supported(caches: Sequence[Any]) -> list[Any]:
    """Return every leaf cache; refuse kinds that cannot be rolled back.

    Raises:
        InvalidRequestError: there is no cache, or one object is in two places.
        UnsupportedCacheError: a leaf is of an unknown kind.
    """
    result = flat(caches)
    known = set(map(type, result)) <= JOURNALS.keys()
    if not (result and known and len(set(map(id, result))) == len(result)):
        names = (kind.__name__ for kind in KNOWN)
        checked_leaves(
            caches, lambda leaf: type(leaf) in JOURNALS, "rolled back", names
        )
    return result


def check_fixed(caches: Sequence[Any]) -> list[Any]:
    """Return every leaf cache; refuse kinds that exact mode cannot use.

    Raises:
        InvalidRequestError: there is no cache, or one object is in two places.
        UnsupportedCacheError: a leaf has neither a fixed view nor a recurrent state.
    """
    kinds = [*FIXED, ArraysCache]
    result = checked_leaves(
        caches,
        lambda leaf: type(leaf) in kinds,
        "shown in a fixed shape (convert a RotatingKVCache with keep=0 with "
        "mlx_speculation.caches.with_slack)",
        (kind.__name__ for kind in kinds),
    )
    return [leaf for _, leaf in result]


def open_fixed(result: Sequence[Any], shape: FixedShape) -> list[Journal]:
    """Return a journal for each of the leaves that `check_fixed` returned."""
    return [
        ArraysJournal(leaf)
        if type(leaf) is ArraysCache
        else JOURNALS[type(leaf)](leaf, shape=shape)
        for leaf in result
    ]


def open_journals(
    result: Sequence[Any],
    *,
    whole: bool,
    isolated: bool = False,
    steps: KeySteps | None = None,
) -> list[Journal]:
    """Return a journal for each of the leaves that `check_supported` returned."""
    if not isolated and steps is None:  # without `_opened`: each call takes time
        return [JOURNALS[type(leaf)](leaf, whole) for leaf in result]
    return [_opened(leaf, whole, isolated, steps) for leaf in result]


def _opened(leaf: Any, whole: bool, isolated: bool, steps: KeySteps | None) -> Journal:
    opened = JOURNALS[type(leaf)]
    if steps is not None and type(leaf) in (KVCache, SlidingKVCache):
        return opened(leaf, whole, steps)
    if isolated:
        return isolate(leaf, lambda twin: opened(twin, whole))
    return opened(leaf, whole)


def presented(caches: Sequence[Any], journals: Iterator[Journal]) -> list[Any]:
    """Return the caches to pass to the model; each leaf takes the next journal."""
    return [
        CacheList(*presented(cache.caches, journals))
        if type(cache) is CacheList
        else next(journals).presented
        for cache in caches
    ]
