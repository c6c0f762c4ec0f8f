"""Hooks on single modules: each hooked module gets a class of its own.

A hook derives a class from a class. The class of a hooked module is its plain class
with the hooks of all owners applied in the order of their ranks, the lowest rank first;
the order in which owners come and leave does not matter. A module has one hook of each
rank: the first requested one, until the last of its owners has left. Parameter paths
and `isinstance` stay the same.

A copy of a hooked module, by `copy` or by `pickle`, is a copy of the plain module: it
has the plain class and none of our attributes, as no owner would remove them from it.
Our attributes begin with `OURS`, so they do not collide with those of a model.

A hooked class makes each call slower, even if the hook does nothing, which matters in a
plain step of a small model on a GPU. So hooks of the rank `OF_ROUNDS` are put on at the
first forward of a round, and taken off at the next plain step (see
`models.round_context`). That is done for all modules of the process at once, as modules
may belong to several models. These hooks check in each call whether their thread is in
a round, as another thread may not be.
"""

import copyreg
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import mlx.nn as nn


class Hook(NamedTuple):
    """A hook: derives a class with `make(kind, *args)`."""

    rank: int  # hooks of a lower rank are nearer to the plain class
    # Returns a class made by `derived`, the same one for the same arguments
    make: Callable[..., type[nn.Module]]
    args: tuple[Any, ...] = ()  # further arguments of `make`


OURS = "_mlx_speculation_"
OF_ROUNDS = -1  # the rank of hooks that do nothing outside of rounds

# Re-entrant: the garbage collector may run in the middle of a change, and remove the
# hooks of a collected generator. They are then removed after the change.
lock = threading.RLock()
_changing = False
_left: list["Hooked"] = []

# Hooked modules by id, with the hook of each rank and its number of owners. It is not
# an attribute of the modules, as it would then be copied with them.
_registry: dict[int, tuple[nn.Module, dict[int, tuple[Hook, int]]]] = {}


@dataclass(slots=True)
class RoundHooks:
    """The hooks of rounds in this process. Changed under `lock` only."""

    # Modules with such a hook by id, and their classes with the hook and without it
    modules: dict[int, tuple[nn.Module, type[nn.Module], type[nn.Module]]] = field(
        default_factory=dict
    )
    on: bool = False  # whether they are on their modules
    forwards: int = 0  # how many forwards of rounds are being built, in all threads

    def turn(self, *, on: bool) -> None:
        """Put all hooks of rounds on their modules, or take them off."""
        with _change():
            self.on = False  # after an interrupt the next round puts all on again
            for module, within, outside in self.modules.values():
                before, after = (outside, within) if on else (within, outside)
                if type(module) is before:  # no class that other code derived from it
                    object.__setattr__(module, "__class__", after)
            self.on = on


round_hooks = RoundHooks()


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
    """Return a copy of a method in which these global names have other values."""
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
    """Return a subclass of `kind` with the same name, whose copies are of `kind`."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    names_of_class = {**names, "__doc__": kind.__doc__, "_hooked_from": kind, **methods}
    names_of_class["__reduce_ex__"] = _reduced
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(kind, name):
            names_of_class[name] = _copying(kind, name)
    return type(kind.__name__, (kind,), names_of_class)


def _reduced(module: nn.Module, protocol: Any) -> Any:
    """Return the `__reduce_ex__` value of the plain module, for `copy` and `pickle`."""
    kind = type(module)  # read once: a round of another thread may change it
    bases = (each for each in kind.__mro__ if "_hooked_from" in vars(each))
    hooked = next(bases, kind)
    if hooked is not kind:  # a class that other code derived from a hooked one
        return unhooked(hooked).__reduce_ex__(module, protocol)
    twin = _plain_twin(module)
    registered = copyreg.dispatch_table.get(type(twin))
    result = registered(twin) if registered else twin.__reduce_ex__(protocol)
    if isinstance(result, str):
        return result
    make, args, *rest = result
    # Pickle recognizes copyreg's two functions by name, and then requires that the
    # class in their arguments is that of the object.
    name = getattr(make, "__name__", "")
    if name == "__newobj__":
        make = args[0].__new__
    elif name == "__newobj_ex__":
        plain, new, named = args
        make, args = partial(plain.__new__, plain, *new, **named), ()
    return (make, args, *rest)


def _plain_twin(module: nn.Module) -> nn.Module:
    """Return a plain module with the same parts, and with attributes except ours."""
    twin = dict.__new__(plain_class(module))
    dict.update(twin, module)
    state = object.__getstate__(module)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    theirs = {k: v for k, v in (attributes or {}).items() if not k.startswith(OURS)}
    vars(twin).update(theirs)
    for name, value in (slots or {}).items():
        object.__setattr__(twin, name, value)
    return twin


def _copying(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return a class's own copy method, changed to return a plain module."""

    def method(module: nn.Module, *args: Any) -> Any:
        made = getattr(kind, name)(module, *args)
        if made is not module and "_hooked_from" in vars(type(made)):
            object.__setattr__(made, "__class__", plain_class(made))
            _forget(made)
        return made

    return method


def _forget(module: nn.Module) -> None:
    """Remove all of our attributes from a module."""
    for name in [name for name in vars(module) if name.startswith(OURS)]:
        object.__delattr__(module, name)


class Hooked:
    """Hooks on modules that one owner has installed, until it removes them.

    Args:
        hooks: pairs of a module and a hook. A module may come several times.
    """

    def __init__(self, hooks: Iterable[tuple[nn.Module, Hook]]) -> None:
        pairs = list(hooks)
        for module, hook in pairs:  # raise errors before any module is changed
            hook.make(plain_class(module), *hook.args)
        self.modules = [module for module, _ in pairs]
        self._pairs = pairs
        with _change():
            for module, hook in pairs:
                _count(module, hook, 1)

    def remove(self) -> None:
        """Remove the hooks, except those that another owner needs."""
        with lock:
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
    with lock:
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
    within = outside = plain_class(module)
    for rank, (each, _) in sorted(hooks.items()):
        within = each.make(within, *each.args)
        if rank != OF_ROUNDS:
            outside = each.make(outside, *each.args)
    if hooks:
        _registry[id(module)] = module, hooks
    else:
        _registry.pop(id(module), None)
        _forget(module)
    if OF_ROUNDS in hooks:
        round_hooks.modules[id(module)] = (module, within, outside)
    else:
        round_hooks.modules.pop(id(module), None)
    object.__setattr__(module, "__class__", within if round_hooks.on else outside)
