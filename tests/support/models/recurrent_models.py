"""Tiny real models of every mlx-lm module that keeps an `ArraysCache`.

Those that the table of tiny models lacks are in recurrent_models.json.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlx_speculation.caches import states
from mlx_speculation.caches.types.leaves import flat
from mlx_speculation.models import ModelHooks
from support.models.tiny_models import (
    TINY_MODELS,
    TinyModel,
    build_tiny,
    read_table,
    structure,
)

_MORE = read_table(Path(__file__).with_suffix(".json"))


def recurrent(caches: list[Any]) -> list[Any]:
    return [cache for cache in flat(caches) if isinstance(cache, ArraysCache)]


def recurrent_caches(model: nn.Module) -> list[ArraysCache]:
    return recurrent(make_prompt_cache(model))


RECURRENT_MODELS: dict[str, TinyModel] = {
    name: tiny
    for name, tiny in (TINY_MODELS | _MORE).items()
    if recurrent_caches(structure(tiny))
}

# Models whose mixers run again over inputs of accepted tokens instead of replaying.
RUN_AGAIN = ("jamba", "mamba", "rwkv7")


def build_recurrent(name: str) -> nn.Module:
    return build_tiny(RECURRENT_MODELS[name])


PREFIX = mx.array([[3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62]])
BLOCK = mx.array([[201, 7, 96, 255, 31, 148]])
# A batch whose first row is that of `BLOCK`.
ROWS = mx.array([[201, 7, 96, 255, 31, 148], [5, 5, 80, 2, 0, 9], [90, 1, 44, 3, 6, 8]])


@contextmanager
def hooked(model: nn.Module) -> Iterator[ModelHooks]:
    owner = ModelHooks(model)
    try:
        yield owner
    finally:
        owner.remove()


def prefilled(model: nn.Module) -> list[Any]:
    """Return caches that hold `PREFIX`."""
    caches = make_prompt_cache(model)
    model(PREFIX, cache=caches)
    mx.eval(states(caches))
    return caches
