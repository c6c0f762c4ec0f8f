"""Transposed weights of linear layers on CUDA, made once for all steps of a stream.

mlx's layer multiplies by `weight.T`, which adds an operation to the graph in every
call, though it only makes a view. With a small model the GPU waits for its host, and a
model of 22 layers has 154 of these views in each step. So a hooked layer uses a view
that was made before. The product is the same operation on the same numbers, and its
results are the same bit for bit.

Views are made when a stream begins, and exist while a stream runs. A layer uses its
view only while its weight is the array of that view; otherwise it multiplies as mlx's
layer does. An array that is changed in place (`weight += 1`) stays the same object, so
running streams do not see the change, and the next stream does.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instance_hooks import OURS, Hook, derived, lock, plain_class
from mlx_speculation.models.round_context import cuda_serves
from mlx_speculation.models.source_digests import is_known

_HELD = OURS + "held"
_RANK = -2  # the innermost hook, which the others call if they do not serve

_NOTHING: tuple[mx.array | None, mx.array | None] = (None, None)


class _Held:
    """A layer's weight and its transposed view, for the streams that run."""

    __slots__ = ("pair", "streams")

    def __init__(self) -> None:
        self.pair = _NOTHING  # replaced as a whole, since other threads may read it
        self.streams: set[object] = set()


@functools.cache
def _transposed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class that multiplies by the view if there is one.

    If somebody has replaced the method of mlx's class, the class calls the new one.
    """
    original: Any = kind.__call__

    def call(self: Any, x: mx.array) -> mx.array:
        # Every step calls this for every layer, so it has few look-ups.
        if kind.__call__ is not original:
            replaced: mx.array = kind.__call__(self, x)
            return replaced
        weight = self["weight"]
        seen, view = self._mlx_speculation_held.pair  # the name is _HELD
        if seen is not weight:
            view = weight.T
        if "bias" in self:
            return mx.addmm(self["bias"], x, view)
        product: mx.array = x @ view
        return product

    return derived(kind, {"__call__": call, _HELD: _Held()})


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for _, module in model.named_modules():
        if plain_class(module) is nn.Linear:
            yield module


def transposed_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each linear layer of a model, with its hook.

    There are none on other devices, where views save almost nothing, or if the source
    of mlx's layer is not the known one.
    """
    if cuda_serves() and is_known(nn.Linear):
        for layer in _layers(model):
            yield layer, Hook(_RANK, _transposed)


@contextmanager
def transposed_weights(model: nn.Module) -> Iterator[None]:
    """Give the hooked layers of a model their views inside the block.

    This evaluates the weights.
    """
    kept: list[_Held] = []
    stream = object()
    try:
        if cuda_serves():
            _take(model, stream, kept)
        yield
    finally:
        with lock:
            for each in kept:
                each.streams.discard(stream)
                if not each.streams:
                    each.pair = _NOTHING


def _take(model: nn.Module, stream: object, kept: list[_Held]) -> None:
    """Make the views for a stream, and add their holders to `kept`."""
    layers = [
        layer
        for layer in _layers(model)
        if hasattr(type(layer), _HELD) and "weight" in layer
    ]
    pairs = [(layer["weight"], layer["weight"].T) for layer in layers]
    mx.eval([view for _, view in pairs])
    with lock:
        for layer, pair in zip(layers, pairs, strict=True):
            if _HELD not in vars(layer):
                object.__setattr__(layer, _HELD, _Held())  # not as a parameter
            kept.append(vars(layer)[_HELD])
            kept[-1].streams.add(stream)
            kept[-1].pair = pair
