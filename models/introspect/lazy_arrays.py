"""Evaluation of all arrays that a model holds, so that any thread can use it.

mlx cannot compute a lazy array in another thread than the one that made it: "There is
no Stream(cpu, 0) in current thread". mlx-lm evaluates the parameters that it loads.
Other arrays can stay lazy: tables under names with an underscore, and weights that a
forward replaces, as in gemma3n.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_CONTAINERS = (list, tuple, set, frozenset)
_NO_STATE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def evaluate_held(*holders: Any) -> None:
    """Compute all arrays that models or heads hold, under any name."""
    mx.eval(list(_arrays(holders)))


@contextmanager
def evaluating_changes(model: nn.Module) -> Iterator[None]:
    """Compute the arrays that the model holds after the block but did not before.

    Arrays that were lazy before stay lazy, unless a new one depends on them.
    """
    before = {id(array): array for array in _arrays(model)}
    yield
    mx.eval([array for array in _arrays(model) if id(array) not in before])


def _arrays(holders: Any) -> Iterator[mx.array]:
    """Yield the arrays in dicts, containers and attributes, but not in closures."""
    waiting, seen = [holders], {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _NO_STATE):
            continue
        seen[id(value)] = value  # kept, so that no other object gets its id
        if isinstance(value, mx.array):
            yield value
            continue
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, _CONTAINERS):
            waiting.extend(value)
        waiting.extend(getattr(value, "__dict__", {}).values())
