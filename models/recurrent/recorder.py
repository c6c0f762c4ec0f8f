"""Recording of the inputs of recurrent mixers, so that a prefix can be replayed.

A hooked mixer records each of its calls on the cache that is passed to the call: the
arguments, and notes of its convolutions and scan. Only the caches of a `Speculation`
record calls. Nothing is stored on the model, so generators and threads do not affect
each other. The state after a prefix is made in one of three ways:

    mixer not listed,    it is not hooked, and after a partial acceptance the model runs
    or source changed    again: correct, but it takes one forward
    notes complete       the state follows from the notes; projections do not run
    otherwise            the mixer runs again over its recorded inputs. If it cannot
                         (see `Recipe.runs_again`), the model runs again
"""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from mlx_speculation.caches import RecordingArraysCache, RecordingLayerCache
from mlx_speculation.models.instance_hooks import Hook, derived, plain_class
from mlx_speculation.models.recurrent.call_notes import (
    Call,
    noting,
    noting_input,
    noting_output,
    scan_of,
    watched,
)
from mlx_speculation.models.recurrent.mixers import COMPRESSORS, MIXERS, Mixer
from mlx_speculation.models.recurrent.replay import (
    CACHE,
    MixerCall,
    Watch,
    first_of,
    part_of,
)
from mlx_speculation.models.source_digests import is_known

_TAKES_NOTES = (RecordingArraysCache, RecordingLayerCache)

# Recording has to be the innermost hook of a mixer: its methods are made from the code
# of the plain class, so a hook inside of it would not run.
_RANK = 0


def _recording_cache(values: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the cache that records calls, and the argument that is or contains it."""
    for value in values:
        if isinstance(value, _TAKES_NOTES):
            return value, value
        if isinstance(value, CacheList):
            return first_of(RecordingArraysCache, value.caches), value
    return None, None


@functools.cache
def _recorded(
    kind: type[nn.Module], mixer: Mixer, scan: Call | None
) -> type[nn.Module]:
    """Return a subclass of `kind` that records its calls on a recording cache."""
    recipe = mixer.recipe
    methods = {} if recipe is None else watched(kind, recipe.watch, scan)
    mixed = methods.pop("__call__", None)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        cache, holder = _recording_cache(values)
        if cache is None:
            return kind.__call__(self, *args, **kwargs)
        noted = tuple(CACHE if v is holder else v for v in args)
        named = {n: CACHE if v is holder else v for n, v in kwargs.items()}
        width = first_of(mx.array, values).shape[1]
        made = MixerCall(self, width, noted, named, recipe)
        with cache.record(made), noting(made.notes):
            result = (mixed or kind.__call__)(self, *args, **kwargs)
        if recipe is not None and not (recipe.runs_again or made.complete):
            cache.written_unrecorded = True
        return result

    return derived(kind, {**methods, "__call__": call})


def _mixer_of(module: nn.Module) -> Mixer | None:
    """Return the `Mixer` of a module; None: it has none, or its source changed."""
    kind = plain_class(module)
    place = (kind.__module__, kind.__name__)
    mixer = MIXERS.get(place) or COMPRESSORS.get(place)
    if mixer is None or not is_known(kind):
        return None
    for home, name in mixer.relies_on:
        if not is_known(getattr(importlib.import_module(home), name, None)):
            return None
    return mixer


def replays_from_notes(module: nn.Module) -> bool:
    """Return whether the state of a mixer follows from notes, and its scan is known."""
    mixer = _mixer_of(module)
    if mixer is None or mixer.recipe is None:
        return False
    watch = mixer.recipe.watch
    return watch.scan is None or scan_of(plain_class(module), watch) is not None


def _parts(module: nn.Module, watch: Watch) -> Iterator[tuple[nn.Module, Hook]]:
    for paths, hook in ((watch.inputs, noting_input), (watch.outputs, noting_output)):
        for path in paths:
            part = part_of(module, path)
            if isinstance(part, nn.Module):
                yield part, Hook(_RANK, hook)


def mixer_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each mixer of a model and its parts, with their hooks."""
    for _, module in model.named_modules():
        mixer = _mixer_of(module)
        if mixer is None:
            continue
        watch = Watch() if mixer.recipe is None else mixer.recipe.watch
        scan = scan_of(plain_class(module), watch)
        yield module, Hook(_RANK, _recorded, (mixer, scan))
        yield from _parts(module, watch)
