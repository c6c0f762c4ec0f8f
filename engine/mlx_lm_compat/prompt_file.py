"""Loading of a file with the caches of a prompt.

`mlx_lm.cache_prompt` or `save_caches` has written the file. Each cache keeps the kind
that it has in the file, for example quantized. The arrays are cast to the dtype of the
loaded model (float32 on a Linux CPU).
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_speculation.caches import KVQuantization, LoadedCaches, load_caches
from mlx_speculation.errors import InvalidRequestError


def load_prompt(path: str | Path, model: nn.Module) -> LoadedCaches:
    """Return the caches of a file, after a check that they fit a model.

    Raises:
        CacheFileError: the file is missing or damaged, or does not fit the model.
        InvalidRequestError: the caches in the file are empty.
    """
    kinds = load_caches(path).caches
    if all(cache.empty() for cache in kinds):
        raise InvalidRequestError(
            f"The caches in {str(path)!r} hold 0 tokens, but at least 1 is needed. "
            "Make the file from a prompt, with mlx_lm.cache_prompt."
        )
    return load_caches(path, like=_used(model, kinds), cast=True)


def _used(model: nn.Module, kinds: list[Any]) -> list[Any]:
    """Return a model's caches, of the given kinds and with one token in them."""
    windows = [cache for cache in kinds if isinstance(cache, RotatingKVCache)]
    fresh = make_prompt_cache(model, windows[0].max_size if windows else None)
    model(mx.zeros((1, 1), mx.int32), cache=fresh)
    for cache in kinds:
        if isinstance(cache, QuantizedKVCache):
            KVQuantization(cache.bits, cache.group_size).replace(fresh)
            break
    return fresh
