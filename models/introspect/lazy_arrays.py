"""Evaluating what a model holds, so that any thread can use it.

An array that is not computed yet belongs to a stream of the thread that made it, and
mlx computes it in no other: "There is no Stream(cpu, 0) in current thread". mlx-lm
evaluates the parameters that it loads. A model may hold more: tables and constants
under names with an underscore, which are no parameters, and weights that a forward puts
in the place of others, as gemma3n's does. Building a forward without computing it
leaves these behind.
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
    """Compute the arrays that models, or heads on them, hold under any name.

    Arrays that are computed already are only visited.
    """
    mx.eval(list(_arrays(holders)))


@contextmanager
def evaluating_changes(model: nn.Module) -> Iterator[None]:
    """Compute the arrays that the model holds after the block and not before.

    Arrays that were lazy before stay lazy, unless a new one depends on them.
    """
    before = {id(array): array for array in _arrays(model)}
    yield
    mx.eval([array for array in _arrays(model) if id(array) not in before])


def _arrays(holders: Any) -> Iterator[mx.array]:
    """Yield the arrays in dicts, containers and attributes, each object looked at once.

    Arrays that only code holds, in a closure say, are not found.
    """
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
