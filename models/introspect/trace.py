"""The calls of one forward of a model, with their arguments and results.

Arrays are compared as objects. The forward is built and not evaluated, so it takes
milliseconds for a large model. Only two kinds of arrays are computed: those that the
model itself evaluates, and new ones that it holds afterwards.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.models.instance_hooks import Hooked
from mlx_speculation.models.introspect.lazy_arrays import evaluating_changes
from mlx_speculation.models.observer import OBSERVED, Observer, observing

POSITIONS = 2  # more than one, so that a lost or swapped axis is noticed


@dataclass(eq=False, slots=True)
class ModuleCall:
    """One call of a module's method."""

    module: nn.Module
    method: str  # "__call__", or "as_linear" of an embedding
    values: tuple[Any, ...]  # the arguments, positional ones first
    start: int  # when it began: how many calls had begun or ended by then
    caller: "ModuleCall | None"  # the innermost observed call around this one
    stop: int = 0  # when it ended, counted in the same way
    result: Any = None

    def contains(self, other: "ModuleCall") -> bool:
        """Return whether another call was made inside of this one, at any depth."""
        return self.start < other.start and other.stop < self.stop

    def reads(self, array: Any) -> bool:
        """Return whether an array is one of the arguments."""
        return any(value is array for value in self.values)


@dataclass(eq=False, slots=True)
class Trace(Observer):
    """The calls of one forward, in the order in which they began."""

    ids: mx.array  # the model's input, [1, POSITIONS]
    # The first call is the model's
    calls: list[ModuleCall] = field(default_factory=list)
    _open: list[ModuleCall] = field(default_factory=list)
    _clock: int = 0

    @property
    def logits(self) -> mx.array:
        """The output of the model."""
        result: mx.array = self.calls[0].result
        return result

    def enter(
        self, module: nn.Module, method: str, values: tuple[Any, ...]
    ) -> mx.array | None:
        """Note that a call begins."""
        caller = self._open[-1] if self._open else None
        call = ModuleCall(module, method, values, self._tick(), caller)
        self.calls.append(call)
        self._open.append(call)
        return None

    def leave(
        self, module: nn.Module, method: str, values: tuple[Any, ...], result: Any
    ) -> None:
        """Note that the innermost call ends."""
        call = self._open.pop()
        call.stop, call.result = self._tick(), result

    def of(self, modules: Iterable[nn.Module]) -> list[ModuleCall]:
        """Return the calls of some modules, in order."""
        members = {id(module) for module in modules}
        return [call for call in self.calls if id(call.module) in members]

    def is_hidden(self, value: Any) -> bool:
        """Return whether a value is a floating-point array [1, POSITIONS, n]."""
        if not isinstance(value, mx.array) or value.ndim != 3:
            return False
        return value.shape[:2] == self.ids.shape and mx.issubdtype(
            value.dtype, mx.floating
        )

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def trace(model: nn.Module) -> Trace:
    """Feed a model two tokens with new caches, and note all calls."""
    result = Trace(mx.zeros((1, POSITIONS), mx.int32))
    hooked = Hooked((module, OBSERVED) for _, module in model.named_modules())
    try:
        with evaluating_changes(model), observing(result, alone=True):
            model(result.ids, cache=make_prompt_cache(model))
    finally:
        hooked.remove()
    return result
