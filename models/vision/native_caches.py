"""mlx-lm's caches in place of mlx-vlm's, class by class.

mlx-vlm has copies of mlx-lm's cache classes. Its models give the same results on
mlx-lm's classes, which this library can roll back. A class is replaced only if its
source is the one that was compared with mlx-lm's.
"""

from typing import Any

from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from mlx_speculation.errors import UnsupportedCacheError
from mlx_speculation.models.source_digests import source_digest
from mlx_speculation.models.vision.families import CACHES, MLX_VLM_VERSION

HOME = "mlx_vlm.models.cache"


def native_caches(language_model: Any) -> list[Any]:
    """Return new caches of mlx-lm for a language model of mlx-vlm.

    Raises:
        UnsupportedCacheError: a cache's class is unknown, or its source has changed.
    """
    make = getattr(language_model, "make_cache", None)
    if make is None:
        return [KVCache() for _ in language_model.layers]
    return [_native(place, cache) for place, cache in enumerate(make())]


def _native(place: int, cache: Any) -> Any:
    """Return a new cache of mlx-lm in place of an empty one of mlx-vlm."""
    kind: type = type(cache)
    if kind in (KVCache, RotatingKVCache):  # the model uses mlx-lm's itself
        return cache
    if kind.__module__ != HOME or kind.__name__ not in CACHES:
        raise UnsupportedCacheError(
            f"The cache of layer {place} is a {kind.__module__}.{kind.__name__}, which "
            "cannot be rolled back. Take a model whose caches are of these classes of "
            f"mlx-vlm: {', '.join(CACHES)}."
        )
    if source_digest(HOME, kind.__name__) != CACHES[kind.__name__]:
        raise UnsupportedCacheError(
            f"The cache of layer {place} is a {kind.__name__} whose source is not that "
            f"of mlx-vlm {MLX_VLM_VERSION}. Install that version."
        )
    if kind.__name__ == "ArraysCache":
        return ArraysCache(size=len(cache.cache))
    if kind.__name__ == "ChunkedKVCache":
        return ChunkedKVCache(cache.chunk_size)
    if kind.__name__ == "RotatingKVCache":
        return RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    return KVCache()
