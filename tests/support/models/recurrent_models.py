"""Tiny real models of every mlx-lm module that keeps an `ArraysCache`.

The first of them are in the table of tiny models; the rest are in
recurrent_models.json beside this file, in the same form.
"""

from pathlib import Path

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlx_speculation.caches.types.leaves import flat
from support.models.tiny_models import (
    TINY_MODELS,
    TinyModel,
    build_tiny,
    read_table,
    structure,
)

_MORE = read_table(Path(__file__).with_suffix(".json"))


def recurrent_caches(model: nn.Module) -> list[ArraysCache]:
    """Return new caches of a model, those of recurrent layers only."""
    caches = flat(make_prompt_cache(model))
    return [cache for cache in caches if isinstance(cache, ArraysCache)]


RECURRENT_MODELS: dict[str, TinyModel] = {
    name: tiny
    for name, tiny in (TINY_MODELS | _MORE).items()
    if recurrent_caches(structure(tiny))
}

# Their mixers run again over their inputs: no recipe for the state.
RUN_AGAIN = ("jamba", "mamba", "rwkv7")


def build_recurrent(name: str) -> nn.Module:
    """Build the named model: the same weights for the same arguments."""
    return build_tiny(RECURRENT_MODELS[name])
