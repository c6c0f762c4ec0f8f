"""Reading rows of the target's caches, for a drafter that attends to them.

    keys, values = read_rows(cache, stop, 512)    # positions [stop - 512, stop)

The result is a view. While the view lives, a write to the cache copies the whole
buffer, so drop the view first. A ring's rows can be out of order. Attention over keys
with rotary positions does not depend on the order.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_speculation.caches.types.sliding_kv import SlidingKVCache
from mlx_speculation.errors import InvalidRequestError, UnsupportedCacheError

_FROM_THE_START = (KVCache, QuantizedKVCache, ConcatenateKVCache)
READABLE = (*_FROM_THE_START, RotatingKVCache, SlidingKVCache)


def check_readable(cache: Any, place: int) -> None:
    """Raise UnsupportedCacheError unless the rows of this cache can be read."""
    known = type(cache) in READABLE
    kept = getattr(cache, "keep", 0)
    if known and kept == 0:
        return
    what = f" with keep={kept}" if known else ""
    names = ", ".join(kind.__name__ for kind in READABLE)
    raise UnsupportedCacheError(
        f"The drafter reads keys and values of layer {place}, but they cannot be read "
        f"from its cache, a {type(cache).__name__}{what}. Use one of {names} with "
        "keep=0, or another drafter."
    )


def read_rows(cache: Any, stop: int, count: int | None) -> tuple[mx.array, mx.array]:
    """Return the rows of the last positions before `stop` that the cache still has.

    The results are keys [batch, heads, rows, key dim] and values [batch, heads, rows,
    value dim]. Quantized rows are dequantized, which copies them. `cache` is not empty,
    and of a kind that `check_readable` allows. `stop` is at most its offset. `count` is
    the largest number of positions to read; None: all.

    Raises:
        InvalidRequestError: the cache has none of these positions.
    """
    kept = _held_rows(cache)
    first = cache.offset - kept  # the position of the oldest row
    start = max(0, 0 if count is None else stop - count, first)
    if not start < stop <= cache.offset:
        raise InvalidRequestError(
            f"Positions [{start}, {stop}) of a {type(cache).__name__} were requested, "
            f"but it holds only [{first}, {cache.offset}). Read them earlier."
        )
    rows = slice(start - first, stop - first)
    kind: Any = type(cache)
    if kind is QuantizedKVCache:
        form = {"group_size": cache.group_size, "bits": cache.bits}
        keys, values = (
            mx.dequantize(*(part[..., rows, :] for part in parts), **form)
            for parts in (cache.keys, cache.values)
        )
        return keys, values
    keys, values = cache.keys, cache.values
    wrapped = kind is RotatingKVCache and not _in_order(cache)
    if wrapped and rows != slice(0, kept):
        keys, values = map(cache._temporal_order, (keys, values))
    return keys[..., rows, :], values[..., rows, :]


def _held_rows(cache: Any) -> int:
    """Return the number of rows in a cache's buffers, up to its offset."""
    if cache.keys is None:
        return 0
    kind = type(cache)
    if kind in _FROM_THE_START:
        return int(cache.offset)
    if kind is SlidingKVCache:
        return int(cache._end)
    return int(cache._idx if _in_order(cache) else cache.keys.shape[2])


def _in_order(ring: Any) -> bool:
    """Return whether a ring's rows are its first `_idx` slots, oldest first."""
    return bool(ring._idx == ring.keys.shape[2] or ring._idx >= ring.offset)
