"""Recording what recurrent mixers are fed, so that a prefix can be replayed.

A mixer is hooked by giving the instance a class of its own, which does the same and
also notes its arguments on the cache it is called with. Only a cache that a
`Speculation` presents takes notes; with any other cache the hook passes through.
Nothing is kept on the model: two generators, or two threads, do not meet. Parameter
paths, `isinstance` and logits stay the same.

The table lists the mixers for which replay was shown to equal plain decoding
(tests/models/test_recording.py). A mixer that is not in it is not hooked, and a
partial acceptance runs the model again instead: right, at the price of one forward.
"""

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.caches import RecordingArraysCache, RecordingLayerCache

# module and class of the mixers that may be replayed. Their array arguments have
# positions on axis 1, and all they keep between calls is in the cache.
REPLAYABLE = frozenset(
    {
        ("mlx_lm.models.bailing_moe_linear", "LinearAttention"),
        ("mlx_lm.models.bailing_moe_v3", "BailingKDA"),
        ("mlx_lm.models.lfm2", "ShortConv"),
        ("mlx_lm.models.mamba", "MambaBlock"),
        ("mlx_lm.models.mamba2", "Mamba2Block"),
        ("mlx_lm.models.nemotron_h", "NemotronHMamba2Mixer"),
        ("mlx_lm.models.qwen3_5", "GatedDeltaNet"),
        ("mlx_lm.models.qwen3_next", "Qwen3NextGatedDeltaNet"),
        ("mlx_lm.models.recurrent_gemma", "RecurrentBlock"),
        ("mlx_lm.models.rwkv7", "Rwkv7ChannelMixing"),
        ("mlx_lm.models.rwkv7", "Rwkv7TimeMixing"),
    }
)

# The same for modules that fill a cache of their own kind.
COMPRESSORS = frozenset({("mlx_lm.models.deepseek_v41", "Compressor")})

_TAKES_NOTES = (RecordingArraysCache, RecordingLayerCache)

# Re-entrant: a collected generator removes its hooks in whatever thread allocates.
_counts_lock = threading.RLock()

_CACHE = object()  # stands for the cache in recorded arguments, which would be a cycle


@dataclass(frozen=True, slots=True)
class MixerCall:
    """One call of a mixer: what it was fed, without the cache."""

    mixer: nn.Module
    width: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def replay(self, cache: Any, keep: int) -> None:
        """Run the mixer over the first `keep` positions; its output is not used."""

        def cut(value: Any) -> Any:
            if value is _CACHE:
                return cache
            if not isinstance(value, mx.array) or value.ndim < 2:
                return value
            return value[:, :keep] if value.shape[1] == self.width else value

        self.mixer(
            *(cut(value) for value in self.args),
            **{name: cut(value) for name, value in self.kwargs.items()},
        )


@functools.cache
def _recorded(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` whose calls are noted on a recording cache."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        cache = next((v for v in values if isinstance(v, _TAKES_NOTES)), None)
        if cache is None:
            return kind.__call__(self, *args, **kwargs)
        inputs = next(v for v in values if isinstance(v, mx.array))
        noted = tuple(_CACHE if v is cache else v for v in args)
        named = {n: _CACHE if v is cache else v for n, v in kwargs.items()}
        with cache.record(MixerCall(self, inputs.shape[1], noted, named)):
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "_recorded_from": kind})


def _plain_class(module: nn.Module) -> type[nn.Module]:
    kind: type[nn.Module] = getattr(type(module), "_recorded_from", type(module))
    return kind


def _mixers(model: nn.Module) -> Iterator[nn.Module]:
    for _, module in model.named_modules():
        kind = _plain_class(module)
        if (kind.__module__, kind.__name__) in REPLAYABLE | COMPRESSORS:
            yield module


class Recorders:
    """The hooks on one model, for the life of their owner.

    Several owners may hook one model; the last one to leave removes the hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mixers = list(_mixers(model))
        for mixer in self._mixers:
            _recorded(_plain_class(mixer))  # made before the lock is taken
        with _counts_lock:
            for mixer in self._mixers:
                count = getattr(mixer, "_recorders", 0)
                object.__setattr__(mixer, "_recorders", count + 1)
                if count == 0:
                    mixer.__class__ = _recorded(type(mixer))

    def remove(self) -> None:
        """Give every mixer its own class back, unless another owner needs the hook."""
        with _counts_lock:
            for mixer in self._mixers:
                count = mixer._recorders - 1
                object.__setattr__(mixer, "_recorders", count)
                if count == 0:
                    mixer.__class__ = _plain_class(mixer)
                    object.__delattr__(mixer, "_recorders")
            self._mixers = []
