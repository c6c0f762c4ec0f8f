"""The weights of linear layers, transposed once for all steps of a stream.

mlx's layer multiplies by `weight.T`, and so every call adds an operation to the graph
that computes nothing: a view of the same numbers in another order. A GPU that serves
a small model waits for its host, and a model of 22 layers has 154 of these views in
each step. Here a layer is given one that was made before. The product is the same
operation on the same numbers, so that its results are the same to the last bit.

Views are made when a stream begins (`TransposedWeights.renew`), and hold for a layer
as long as its weight is the array that they are of; otherwise it multiplies as mlx's
does. An array that is changed in place (`weight += 1`) stays the same object: streams
that begin afterwards see the change, and one that runs meanwhile has caches of the old
weights anyway.
"""

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instances import Hook, derived, plain_class

_RANK = -2  # inside of all others, which call it where they have nothing better

# By the id of a layer: its weight, and the view of it.
_views: dict[int, tuple[mx.array, mx.array]] = {}


@functools.cache
def _transposed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class that multiplies by the view, where there is one.

    Where somebody has put another method in mlx's class, that one is called.
    """
    original: Any = kind.__call__

    def call(self: nn.Module, x: mx.array) -> mx.array:
        current: Any = kind.__call__
        if current is not original:
            replaced: mx.array = current(self, x)
            return replaced
        weight = self["weight"]
        held = _views.get(id(self))
        view = held[1] if held is not None and held[0] is weight else weight.T
        if "bias" in self:
            return mx.addmm(self["bias"], x, view)
        return x @ view

    return derived(kind, {"__call__": call})


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for _, module in model.named_modules():
        if plain_class(module) is nn.Linear:
            yield module


def transposed_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each linear layer of a model, with its hook."""
    for layer in _layers(model):
        yield layer, Hook(_RANK, _transposed)


class TransposedWeights:
    """The views of one model, whose layers are hooked.

    Models may share layers, and then views; who drops them makes the others slower
    until their next stream begins.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [layer for layer in _layers(model) if "weight" in layer]

    def renew(self) -> None:
        """Make the views anew; weights that are not evaluated yet are."""
        weights = [layer["weight"] for layer in self._layers]
        views = [weight.T for weight in weights]
        mx.eval(views)
        for layer, weight, view in zip(self._layers, weights, views, strict=True):
            _views[id(layer)] = (weight, view)

    def drop(self) -> None:
        """Hold no weights any more."""
        for layer in self._layers:
            _views.pop(id(layer), None)
