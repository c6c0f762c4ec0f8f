"""Reading the rows of a cache that belongs to somebody else.

    keys, values = read_rows(cache, stop, 512)    # positions [stop - 512, stop)

What is returned is a view for the moment, and has to be gone before the next write to
the cache: while it is held, that write copies the whole buffer. Rows come in any order,
since attention over rotated keys has none. A ring is read as it lies.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_speculation.caches.types.shared_rows import native_type
from mlx_speculation.caches.types.sliding_kv import SlidingKVCache
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError

_FROM_THE_START = (KVCache, QuantizedKVCache, ConcatenateKVCache)
READABLE = (*_FROM_THE_START, RotatingKVCache, SlidingKVCache)


def check_readable(cache: Any, place: int) -> None:
    """Refuse a cache whose rows cannot be read. Touches nothing.

    Raises:
        UnsupportedCacheError: it is of another kind, or keeps its first rows.
    """
    known = native_type(cache) in READABLE
    kept = getattr(cache, "keep", 0)
    if known and kept == 0:
        return
    what = f"with keep={kept}" if known else "of another kind"
    names = ", ".join(kind.__name__ for kind in READABLE)
    raise UnsupportedCacheError(
        f"A drafter is to read the keys and values of layer {place}, whose cache is a "
        f"{type(cache).__name__} {what}, and those that can be read are {names} with "
        "keep=0. Use such caches, or another drafter."
    )


def read_rows(cache: Any, stop: int, count: int | None) -> tuple[mx.array, mx.array]:
    """Return the rows of the last positions before `stop`, those that are held.

    Args:
        cache: one that `check_readable` has passed, which holds something.
        stop: the position after the last one that is read, at most the cache's offset.
        count: how many positions at most; None: all.

    Returns:
        Keys [batch, heads, rows, key dim] and values [batch, heads, rows, value dim];
        quantized ones are dequantized, at the price of a copy.

    Raises:
        InvalidRequestError: the cache holds none of them.
    """
    kept = _held_rows(cache)
    first = cache.offset - kept  # the position of row 0, once they are in order
    start = max(0, 0 if count is None else stop - count, first)
    if not start < stop <= cache.offset:
        raise InvalidRequestError(
            f"Positions [{start}, {stop}) of a {type(cache).__name__} were to be read, "
            f"which holds [{first}, {cache.offset}). Read it before it moves on."
        )
    rows = slice(start - first, stop - first)
    if native_type(cache) is QuantizedKVCache:
        form = {"group_size": cache.group_size, "bits": cache.bits}
        keys, values = (
            mx.dequantize(*(part[..., rows, :] for part in parts), **form)
            for parts in (cache.keys, cache.values)
        )
        return keys, values
    keys, values = cache.keys, cache.values
    wrapped = native_type(cache) is RotatingKVCache and not _in_order(cache)
    if wrapped and rows != slice(0, kept):
        keys, values = map(cache._temporal_order, (keys, values))
    return keys[..., rows, :], values[..., rows, :]


def _held_rows(cache: Any) -> int:
    """Return how many rows the buffers of a cache hold, the last of them at offset."""
    if cache.keys is None:
        return 0
    kind = native_type(cache)
    if kind in _FROM_THE_START:
        return int(cache.offset)
    if kind is SlidingKVCache:
        return int(cache._end)
    return int(cache._idx if _in_order(cache) else cache.keys.shape[2])


def _in_order(ring: Any) -> bool:
    """Return whether rows [0, _idx) of a ring are in order, and all that it holds."""
    return bool(ring._idx == ring.keys.shape[2] or ring._idx >= ring.offset)
