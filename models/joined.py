"""Layers that are fed the same, in one product, on an x86-64 CPU.

In a round over several rows a product of OpenBLAS waits for its second thread to wake
up, and packs the rows anew. Queries, keys and values have one weight for all of them,
and so have the projections into a recurrent layer. Their own weights become views of
it, equal in every value, so that it takes no memory of its own but where other models
share these arrays, and whoever reads, saves, replaces or changes a weight sees nothing
of it. Layers of which a weight is another one multiply by themselves again: in each
round it is seen whether the values stand where they were put, which takes some 2
microseconds for each of them. What was put there is let go of then, or when the next
generator is made.

Gates are left alone: what is computed from half a row each, element by element, takes
longer than the product saves. So are forwards over one token, which gain nothing, and
what mlx compiles, where weights have no values.

Results differ by rounding at most, and with OpenBLAS 0.3.34 they were the same bits.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import is_
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_speculation.models.in_round import (
    device_of_round,
    forward_of_round,
    x86_serves,
)
from mlx_speculation.models.instances import Hook, derived, plain_class

_RANK = -1
_NAME = "_joined"

# Children of one module of mlx-lm that are mostly fed the same.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)


class Joined:
    """The weight that those of some layers are views of.

    The layers hold it, so it holds none of them: a cycle would keep the weights of a
    model that nobody has any more. A copy of a layer has none.

    Args:
        layers: linear ones, of float32, with inputs of one width.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = [ref(layer) for layer in layers]
        weights = [layer["weight"] for layer in layers]
        counts = [weight.shape[0] for weight in weights]
        self._ends = list(accumulate(counts[:-1]))
        self._whole: mx.array | None = mx.concatenate(weights)
        views = mx.split(self._whole, self._ends)
        mx.eval(self._whole, views)
        self._places = [_place(view) for view in views]
        for layer, view in zip(layers, views, strict=True):
            layer["weight"] = view
            # Not a parameter: nn.Module would put it among them.
            object.__setattr__(layer, _NAME, self)
        self._left_out = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def is_of(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these are the layers, with the values that they got here."""
        own = [layer() for layer in self._layers]
        same = len(own) == len(layers) and all(map(is_, own, layers))
        return same and self._stands(layers)

    def let_go(self) -> None:
        """Hold nothing any more, and multiply one by one."""
        self._whole = None

    def leave_out(self) -> None:
        """Multiply one by one from now on: a result was not asked for."""
        self._left_out = True

    def found(self, layer: nn.Module, x: mx.array) -> mx.array | None:
        """Return the result of a layer if it comes from a common product.

        The first layer has it computed, and results of the others kept for them.

        Args:
            layer: one of them.
            x: what it is fed, [..., width].
        """
        layers = [each() for each in self._layers]
        if layer is not layers[0]:
            return forward_of_round().take(id(layer), x)
        whole = self._whole
        if whole is None or self._left_out or forward_of_round().tokens < 2:
            return None
        if x.dtype != mx.float32 or x.shape[-1] != whole.shape[-1]:
            return None
        if not self._stands(layers):
            self.let_go()
            return None
        kept = forward_of_round().kept
        first, *more = mx.split(x @ whole.T, self._ends, axis=-1)
        for other, result in zip(layers[1:], more, strict=True):
            kept[id(other)] = (x, _biased(other, result), self.leave_out)
        return _biased(layer, first)

    def _stands(self, layers: Sequence[Any]) -> bool:
        """Whether the weights are what they were made here, and not only equal.

        An array that is changed in place is the same object, and one that mlx has
        traced is another one, so their places in memory tell. The common weight keeps
        its own, so that nothing else gets it.
        """
        places = zip(layers, self._places, strict=True)
        return self._whole is not None and all(
            layer is not None and _place(layer["weight"]) == place
            for layer, place in places
        )


def _place(weight: mx.array) -> tuple[Any, ...] | None:
    """Return where the values of a weight of float32 are, and how they stand there."""
    if weight.dtype != mx.float32:
        return None
    found = np.asarray(weight).__array_interface__  # nothing is copied
    return found["data"][0], found["shape"], found["strides"]


def _biased(layer: Any, result: mx.array) -> mx.array:
    return result + layer["bias"] if "bias" in layer else result


@functools.cache
def _asking(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class for layers that have a common weight."""
    usual: Any = kind.__call__

    def call(self: nn.Module, x: mx.array) -> mx.array:
        found: mx.array | None = None
        if device_of_round() == "x86":
            joined: Joined | None = getattr(self, _NAME)
            found = None if joined is None else joined.found(self, x)
        return usual(self, x) if found is None else found

    return derived(kind, {"__call__": call})


def _joinable(layer: Any) -> bool:
    """Whether a layer multiplies by a weight of float32, and adds a bias at most."""
    if not isinstance(layer, nn.Module) or plain_class(layer) is not nn.Linear:
        return False
    return bool(layer["weight"].dtype == mx.float32)


def joined_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Join weights, and yield each layer that has a common one, with its hook."""
    if not x86_serves():
        return
    for _, module in model.named_modules():
        if not plain_class(module).__module__.startswith("mlx_lm.models."):
            continue
        for names in _TOGETHER:
            layers = [module[name] for name in names if name in module]
            for layer in layers:
                held: Joined | None = getattr(layer, _NAME, None)
                if held is not None and not held.is_of(layers):
                    held.let_go()
            if len(layers) < 2 or not all(map(_joinable, layers)):
                continue
            if len({layer["weight"].shape[-1] for layer in layers}) > 1:
                continue
            known: Joined | None = getattr(layers[0], _NAME, None)
            if known is None or not known.is_of(layers):
                Joined(layers)
            for layer in layers:
                yield layer, Hook(_RANK, _asking)
