"""Observers of the calls that a model makes to its modules.

An observed module gets a class of its own (see `instance_hooks`), whose methods pass
arguments and results to the observers of the current thread.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instance_hooks import Hook, derived

METHODS = ("__call__", "as_linear")

_observers: ContextVar[tuple["Observer", ...]] = ContextVar("observers", default=())


class Observer:
    """Observer of calls. `values` are a call's arguments, positional ones first."""

    def enter(
        self, module: nn.Module, method: str, values: tuple[Any, ...]
    ) -> mx.array | None:
        """Observe the start of a call; return None, or an array in place of its result.

        With an array, neither the module nor a further observer is called. An exception
        ends the forward.
        """
        return None

    def leave(
        self, module: nn.Module, method: str, values: tuple[Any, ...], result: Any
    ) -> None:
        """Observe the end of a call that was not replaced."""


@contextmanager
def observing(*observers: Observer, alone: bool = False) -> Iterator[None]:
    """Let observers observe the calls of this thread inside of the block.

    The observers of enclosing blocks observe too, unless `alone` is set.
    """
    others = () if alone else _observers.get()
    token = _observers.set((*others, *observers))
    try:
        yield
    finally:
        _observers.reset(token)


def first_array(values: Any) -> Any:
    """Return an array itself, or the first array in a tuple or list; None: no array."""
    if isinstance(values, tuple | list):
        return next((value for value in values if isinstance(value, mx.array)), None)
    return values if isinstance(values, mx.array) else None


@functools.cache
def _observed(kind: type[nn.Module]) -> type[nn.Module]:
    methods = {name: _telling(kind, name) for name in METHODS if _has(kind, name)}
    return derived(kind, methods)


def _has(kind: type[nn.Module], name: str) -> bool:
    # hasattr would find the __call__ that makes instances of a class.
    return any(name in vars(base) for base in kind.__mro__)


def _telling(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        observers = _observers.get()
        values = (*args, *kwargs.values()) if observers else ()
        for observer in observers:
            instead = observer.enter(self, name, values)
            if instead is not None:
                return instead
        result = getattr(kind, name)(self, *args, **kwargs)
        for observer in observers:
            observer.leave(self, name, values, result)
        return result

    return method


OBSERVED = Hook(1, _observed)
