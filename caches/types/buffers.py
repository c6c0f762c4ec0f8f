"""The arrays that hold the rows of a cache; copies of arrays."""

from typing import Any

import mlx.core as mx

Arrays = tuple[mx.array, ...]


def buffers(cache: Any) -> Arrays:
    """Return a cache's arrays, with its rows on axis -2; () for an empty cache."""
    if cache.keys is None:
        return ()
    if isinstance(cache.keys, mx.array):
        return cache.keys, cache.values
    return *cache.keys, *cache.values


def own(array: mx.array) -> mx.array:
    """Return a copy, not evaluated, in a new buffer of exactly the array's size."""
    # `mx.contiguous` would share the old buffer if `array` is nearly all of it.
    return mx.concatenate([array, array[:0]])
