"""Forwards in which the result of a module is replaced, or that end at a module.

So the code of a model before its first layer, such as a scale, can run alone. The code
after its trunk, such as a soft cap, can run on a given array. No cache is used.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models.observer import Observer, first_array, observing


class _Instead(Observer):
    """Replaces the result of one module by an array; None: ends the forward there."""

    def __init__(self, module: nn.Module, array: mx.array | None) -> None:
        self._module = module
        self._array = array
        self.given = False

    def enter(
        self, module: nn.Module, method: str, values: tuple[Any, ...]
    ) -> mx.array | None:
        if module is not self._module or method != "__call__":
            return None
        if self._array is None:
            raise _ReachedError(first_array(values))
        self.given = True
        return self._array[...]  # a copy: the model may write into it


class _ReachedError(Exception):
    """Ends a forward at a module; has the module's input."""


def logits_of(
    model: nn.Module,
    module: nn.Module,  # the trunk or the final norm, with the hook `OBSERVED`
    result: mx.array,  # [batch, positions, dim]
    also: Observer | None = None,  # a further observer of the forward
) -> mx.array:
    """Return the logits of a model in which a module returns `result`.

    Operations before the final norm can be built, but are never evaluated.
    """
    instead = _Instead(module, result)
    others = () if also is None else (also,)
    with observing(instead, *others, alone=True):
        logits: mx.array = model(mx.zeros(result.shape[:2], mx.int32))
    if not instead.given:
        raise _changed(model, module)
    return logits


def input_of(model: nn.Module, module: nn.Module, tokens: mx.array) -> mx.array:
    """Return the first input of a module when a model is fed tokens without a cache.

    `module` has the hook `OBSERVED`; neither it nor a later one is called. `tokens` are
    [batch, positions].
    """
    try:
        with observing(_Instead(module, None), alone=True):
            model(tokens)
    except _ReachedError as reached:
        result: mx.array = reached.args[0]
        return result
    raise _changed(model, module)


def _changed(model: nn.Module, module: nn.Module) -> UnsupportedModelError:
    name, part = type(model).__module__, type(module).__name__
    return UnsupportedModelError(
        f"A forward of {name} did not call the {part} that it called before. Make "
        "HiddenStates after the last change to the model's modules."
    )
