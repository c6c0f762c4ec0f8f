"""Conversions of lists of caches: rings to sliding windows, sequences to batches.

    caches = with_slack(make_prompt_cache(model))      for speed
    save_prompt_cache("prompt", as_native(caches))     mlx-lm loads only its own kinds
    batch = merged([caches, others])                   two sequences in one batch

`with_slack` and `as_native` return new lists and do not change the given caches. A
cache that is not replaced is in both lists, so use only one of the lists afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_speculation.caches.types.leaves import flat, is_batch, states
from mlx_speculation.caches.types.padded_kv import asks_cudnn
from mlx_speculation.caches.types.ragged_kv import RaggedKVCache
from mlx_speculation.caches.types.ragged_quantized_kv import RaggedQuantizedKVCache
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache


def with_slack(caches: Sequence[Any], slack: int | None = None) -> list[Any]:
    """Return the caches, with `SlidingKVCache`s in place of rings with `keep=0`.

    Raises:
        InvalidRequestError: a ring (`RotatingKVCache`) lacks rows of its window.
    """
    return _replaced(
        caches,
        lambda leaf: type(leaf) is RotatingKVCache and leaf.keep == 0,
        lambda ring: SlidingKVCache.from_native(ring, slack),
    )


def as_native(caches: Sequence[Any]) -> list[Any]:
    """Return the caches, with a `RotatingKVCache` in place of each `SlidingKVCache`."""
    return _replaced(
        caches, lambda leaf: type(leaf) is SlidingKVCache, SlidingKVCache.to_native
    )


def _replaced(
    caches: Sequence[Any], due: Callable[[Any], bool], change: Callable[[Any], Any]
) -> list[Any]:
    """Return the caches with `change` applied to each leaf for which `due` is true."""
    return [
        CacheList(*_replaced(cache.caches, due, change))
        if type(cache) is CacheList
        else change(cache)
        if due(cache)
        else cache
        for cache in caches
    ]


def merged(rows: Sequence[Sequence[Any]], *, in_steps: bool = False) -> list[Any]:
    """Return batch caches with copies of `rows`, the caches of each sequence.

    Each `RaggedKVCache` of the result gets `in_steps`.
    """
    result = _merged([as_native(caches) for caches in rows])
    for leaf in flat(result):
        if type(leaf) is RaggedKVCache:
            leaf.in_steps = in_steps
    mx.eval(states(result))
    return result


def _merged(rows: Sequence[Sequence[Any]]) -> list[Any]:
    result: list[Any] = []
    for layer in zip(*rows, strict=True):
        if type(layer[0]) is CacheList:
            result.append(CacheList(*_merged([one.caches for one in layer])))
        elif type(layer[0]) is KVCache:
            result.append(RaggedKVCache.merge(layer))
        elif type(layer[0]) is QuantizedKVCache:
            result.append(RaggedQuantizedKVCache.merge(layer))
        else:
            result.append(type(layer[0]).merge(list(layer)))
    return result


def extend_all(caches: Sequence[Any], others: Sequence[Any]) -> None:
    """Append the rows of other batch caches; if one layer fails, restore all caches."""
    # Keeping the old attributes suffices: `extend` changes no array in place.
    before = [(vars(leaf), dict(vars(leaf))) for leaf in flat(caches)]
    try:
        for cache, other in zip(caches, others, strict=True):
            cache.extend(other)
        mx.eval(states(caches))  # so that running out of memory is noticed here
    except BaseException:
        for attributes, old in before:
            attributes.clear()
            attributes.update(old)
        raise


def has_states(caches: Sequence[Any]) -> bool:
    """Return whether a layer has a recurrent state instead of rows."""
    return any(isinstance(leaf, ArraysCache) for leaf in flat(caches))


def meets_plans(caches: Sequence[Any]) -> bool:
    """Return whether each new number of keys costs a new attention plan of cuDNN."""
    buffers = [leaf.keys for leaf in flat(caches) if is_batch(leaf)]
    return any(
        isinstance(keys, mx.array) and asks_cudnn(keys.dtype) for keys in buffers
    )


def columns_shown(caches: Sequence[Any]) -> tuple[int, ...]:
    """Return the distinct numbers of columns that the layers' last writes returned.

    Columns are the axis of positions: [rows, heads, columns, dim].
    """
    result = [leaf for leaf in flat(caches) if isinstance(leaf, RaggedKVCache)]
    return tuple(sorted({leaf.shown for leaf in result}))


def others_are_longer(caches: Sequence[Any], rows: Sequence[int]) -> bool:
    """Return whether a row not in `rows` needs a larger buffer than those in `rows`."""
    result = [leaf for leaf in flat(caches) if isinstance(leaf, RaggedKVCache)]
    return any(leaf.needed() > leaf.needed(rows) for leaf in result)
