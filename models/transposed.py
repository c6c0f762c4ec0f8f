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


class _Held:
    """A layer's weight, and the view of it, once both are set.

    Copies of a layer hold nothing: nobody would renew it.
    """

    __slots__ = ("view", "weight")

    def __init__(self) -> None:
        self.weight: mx.array | None = None
        self.view: mx.array | None = None

    def take(self, weight: mx.array | None, view: mx.array | None) -> None:
        """Hold these; a step that another thread builds meanwhile never mixes them."""
        self.weight = None
        self.view = view
        self.weight = weight

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Held":
        return _Held()


@functools.cache
def _transposed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class that multiplies by the view, where there is one.

    Where somebody has put another method in mlx's class, that one is called.
    """
    original: Any = kind.__call__

    def call(self: Any, x: mx.array) -> mx.array:
        # Every step calls it for every layer, so that each look-up in it counts.
        if kind.__call__ is not original:
            replaced: mx.array = kind.__call__(self, x)
            return replaced
        weight, held = self["weight"], self._held
        view = held.view if held.weight is weight else weight.T
        if "bias" in self:
            return mx.addmm(self["bias"], x, view)
        product: mx.array = x @ view
        return product

    return derived(kind, {"__call__": call, "_held": _Held()})


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
            if "_held" not in vars(layer):  # not a parameter: nn.Module would take it
                object.__setattr__(layer, "_held", _Held())
            vars(layer)["_held"].take(weight, view)

    def drop(self) -> None:
        """Hold no weights any more."""
        for layer in self._layers:
            if (held := vars(layer).pop("_held", None)) is not None:
                held.take(None, None)
