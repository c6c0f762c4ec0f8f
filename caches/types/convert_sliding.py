"""Whole lists of caches, with sliding caches in place of rings and back.

    caches = with_slack(make_prompt_cache(model))      for speed
    save_prompt_cache("prompt", as_native(caches))     mlx-lm loads its own kinds only

Both return new lists and leave the given caches as they are. A cache that is not
replaced stands in both lists, so use one of the two lists afterwards.
"""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import CacheList, RotatingKVCache

from mlx_speculation.caches.types.sliding_kv import SlidingKVCache


def with_slack(caches: Sequence[Any], slack: int | None = None) -> list[Any]:
    """Return the caches with a `SlidingKVCache` for each ring with `keep=0`.

    Raises:
        InvalidRequestError: a ring was cut and lacks rows of its window.
    """
    return [_with_slack(cache, slack) for cache in caches]


def as_native(caches: Sequence[Any]) -> list[Any]:
    """Return the caches with a `RotatingKVCache` for each `SlidingKVCache`."""
    return [_as_native(cache) for cache in caches]


def _with_slack(cache: Any, slack: int | None) -> Any:
    if type(cache) is CacheList:
        return CacheList(*with_slack(cache.caches, slack))
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return SlidingKVCache.from_native(cache, slack)
    return cache


def _as_native(cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*as_native(cache.caches))
    return cache.to_native() if type(cache) is SlidingKVCache else cache
