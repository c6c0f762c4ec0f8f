"""The leaf caches in a model's list of caches, and how many positions they hold.

A `CacheList` holds further caches; a leaf is any cache that is not a `CacheList`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
)

from mlx_speculation.caches.types.ragged_kv import RaggedKVCache
from mlx_speculation.caches.types.ragged_quantized_kv import RaggedQuantizedKVCache
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError

BATCHES = frozenset(
    {BatchKVCache, BatchRotatingKVCache, RaggedKVCache, RaggedQuantizedKVCache}
)


def is_batch(leaf: Any) -> bool:
    """Return whether a leaf is of a kind with one offset for each of its sequences."""
    return type(leaf) in BATCHES


def leaves(caches: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield every leaf cache with its place: `2`, or `2.0` inside a `CacheList`."""
    for index, cache in enumerate(caches):
        if type(cache) is CacheList:
            for place, leaf in leaves(cache.caches):
                yield f"{index}.{place}", leaf
        else:
            yield str(index), cache


def checked_leaves(
    caches: Sequence[Any],  # one per layer
    known: Callable[[Any], bool],  # whether a leaf is of a known kind
    can: str,  # for the message: what can be done with known kinds
    kinds: Iterable[str],  # for the message: the names of known kinds
    whose: str = "The cache",  # for the message; or "The target's cache"
) -> list[tuple[str, Any]]:
    """Return every leaf with its place; refuse unknown kinds, and an object used twice.

    Raises:
        InvalidRequestError: there is no cache, or one object is in two places.
        UnsupportedCacheError: a leaf is of an unknown kind.
    """
    places: dict[int, str] = {}
    result = list(leaves(caches))
    for place, leaf in result:
        if not known(leaf):
            raise UnsupportedCacheError(
                f"{whose} of layer {place} is a {type(leaf).__name__}, which cannot be "
                f"{can}. Use one of {', '.join(kinds)}."
            )
        if id(leaf) in places:
            raise InvalidRequestError(
                f"One cache object is used for layers {places[id(leaf)]} and {place}. "
                "Make a separate cache for each, as make_prompt_cache does."
            )
        places[id(leaf)] = place
    if not result:
        raise InvalidRequestError(
            f"There is no cache among the {len(caches)} items of the list of caches. "
            "Pass what mlx_lm.models.cache.make_prompt_cache(model) returns."
        )
    return result


def flat(caches: Sequence[Any]) -> list[Any]:
    """Return every leaf cache, without its place: faster than `leaves`."""
    if CacheList not in map(type, caches):
        return list(caches)
    result: list[Any] = []
    for cache in caches:
        result += flat(cache.caches) if type(cache) is CacheList else (cache,)
    return result


def check_single(caches: Sequence[Any]) -> None:
    """Raise UnsupportedCacheError if a leaf is a batch or holds several sequences."""
    for leaf in flat(caches):
        several = type(leaf) is ArraysCache and leaf.batch_size > 1
        if several or is_batch(leaf):
            place = next(p for p, other in leaves(caches) if other is leaf)
            content = f"{type(leaf).__name__} for a batch of {_size(leaf)}"
            raise UnsupportedCacheError(
                f"The cache of layer {place} is a {content}, and a cache for one "
                "sequence is needed. Pass cache.extract(index) of every layer, or run "
                "the batch in its own Speculation, and commit one number per sequence."
            )


def _size(leaf: Any) -> int:
    return int(leaf.offset.shape[0] if is_batch(leaf) else leaf.batch_size)


def position(caches: Sequence[Any]) -> int | None:
    """Return how many positions the caches hold; None: no leaf counts them.

    If leaves count different numbers, the largest is returned: a leaf that the model
    does not use stays at 0.

    Raises:
        InvalidRequestError: a leaf is a batch cache, with an offset for each sequence.
    """
    offsets = [leaf.offset for leaf in flat(caches) if hasattr(leaf, "offset")]
    if mx.array in map(type, offsets):
        size = next(each.shape[0] for each in offsets if isinstance(each, mx.array))
        raise InvalidRequestError(
            f"Caches for a batch of {size} have no single position. Read the offset of "
            "a cache, an array with one position for each sequence."
        )
    return max(offsets) if offsets else None


def assign(caches: Sequence[Any], fields: Sequence[dict[str, Any]]) -> None:
    """Set the fields of all caches, or of none if Ctrl-C interrupts."""
    # One call, so that no Python code runs between the updates.
    deque(map(dict.update, [vars(cache) for cache in caches], fields), maxlen=0)


def states(caches: Sequence[Any]) -> list[Any]:
    """Return all arrays of the caches, to evaluate them."""
    return [cache.state for cache in caches]
