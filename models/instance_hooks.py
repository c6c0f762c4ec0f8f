"""Hooks on single modules: each hooked module gets a class of its own.

A hook derives a subclass from a class. The class of a hooked module is its plain class
with the hooks of all owners applied, those of the lowest rank first. Of several hooks
of one rank, a module has the first one requested, until no owner needs that rank.
Parameter paths and `isinstance` stay the same.

A copy of a hooked module has the plain class, since no owner would remove hooks from
the copy.
"""

import copyreg
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import mlx.nn as nn


class Hook(NamedTuple):
    """A hook: derives a class with `make(kind, *args)`."""

    rank: int  # the lowest rank is applied first
    # Returns a class made by `derived`, the same one for the same arguments
    make: Callable[..., type[nn.Module]]
    args: tuple[Any, ...] = ()


# Re-entrant: during a change the garbage collector can call `remove` for a collected
# generator, whose hooks are then removed after the change.
_lock = threading.RLock()
_changing = False
_left: list["Hooked"] = []

# Hooked modules by id, with the hook of each rank and its number of owners. These are
# no attributes of the modules, since copies of the modules would have them too.
_registry: dict[int, tuple[nn.Module, dict[int, tuple[Hook, int]]]] = {}


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without our hooks.

    A class that other code derived from a hooked class is returned as it is.
    """
    return unhooked(type(module))


def unhooked(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the plain class from which hooks have derived a class."""
    while "_hooked_from" in vars(kind):
        kind = vars(kind)["_hooked_from"]
    return kind


def made_again(method: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a method with other values for these global names."""
    again = FunctionType(
        method.__code__,
        {**method.__globals__, **names},
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    again.__kwdefaults__ = method.__kwdefaults__
    return again


def derived(kind: type[nn.Module], methods: dict[str, Any]) -> type[nn.Module]:
    """Return a subclass of `kind`, of the same name; copies of instances lack hooks."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    names_of_class = {**names, "__doc__": kind.__doc__, "_hooked_from": kind, **methods}
    names_of_class["__reduce_ex__"] = _reduced
    return type(kind.__name__, (kind,), names_of_class)


def _reduced(module: nn.Module, protocol: Any) -> Any:
    """Return the `__reduce_ex__` value that a module would have without hooks."""
    kind = plain_class(module)
    if kind.__reduce_ex__ is _reduced:  # other code derived it from a hooked class
        return object.__reduce_ex__(module, protocol)
    twin = dict.__new__(kind)
    dict.update(twin, module)
    vars(twin).update(vars(module))
    reduced: Any = twin.__reduce_ex__(protocol)
    make, args, *rest = reduced
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Pickle requires that the argument of `__newobj__` is the object's class.
        make = args[0].__new__
    return (make, args, *rest)


class Hooked:
    """Hooks that one owner has installed on modules, until it removes them.

    A module can be in several pairs of `hooks`.
    """

    def __init__(self, hooks: Iterable[tuple[nn.Module, Hook]]) -> None:
        pairs = list(hooks)
        for module, hook in pairs:  # raises errors before any module is changed
            hook.make(plain_class(module), *hook.args)
        self._pairs = pairs
        with _change():
            for module, hook in pairs:
                _count(module, hook, 1)

    def remove(self) -> None:
        """Remove the hooks, except those that another owner needs."""
        with _lock:
            if _changing:
                _left.append(self)
                return
            with _change():
                pairs, self._pairs = self._pairs, []
                for module, hook in pairs:
                    _count(module, hook, -1)


@contextmanager
def _change() -> Iterator[None]:
    """Exclude other changes of classes, in this thread and in others."""
    global _changing
    with _lock:
        _changing = True
        try:
            yield
        finally:
            _changing = False
            while _left:
                _left.pop().remove()


def _count(module: nn.Module, hook: Hook, change: int) -> None:
    """Change the number of a hook's owners by 1 or -1; update the module's class."""
    _, hooks = _registry.get(id(module), (module, {}))
    first, count = hooks.get(hook.rank, (hook, 0))
    hooks = {**hooks, hook.rank: (first, count + change)}
    if not hooks[hook.rank][1]:
        del hooks[hook.rank]
    kind = plain_class(module)
    for _, (each, _) in sorted(hooks.items()):
        kind = each.make(kind, *each.args)
    if hooks:
        _registry[id(module)] = module, hooks
    else:
        _registry.pop(id(module), None)
    object.__setattr__(module, "__class__", kind)
