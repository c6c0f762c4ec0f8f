"""Classes for single instances: what a hooked module is, and whose hook it is.

A hook makes a class from a class. The class of a hooked module is its plain class
with the hooks of all owners on it, those of a lower rank inside, whatever the order
in which owners come and leave. Of one rank a module has one hook, the first that was
asked for, until the last of its owners has left. Parameter paths and `isinstance`
stay the same; what a hook does in a call is for its maker to say.

A copy of a hooked module, by `copy` or by `pickle`, is one of the plain module: it has
the plain class and no attribute of ours, since no owner would ever take them off it.
Attributes of ours begin with `OURS`, so that they meet none of a model's.

A class of one's own has its price in each call, also where the hook then does nothing,
and a plain step of a small model on a GPU feels it. Hooks of the rank `OF_ROUNDS` are
therefore on their modules from the first forward of a round to the next plain step (see
`models.round_context`), all of this process together: modules may belong to several
models. They ask for themselves whether they are in a round, as other threads may not
be.
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
    """Maker of a class: `make(kind, *args)`."""

    rank: int  # hooks of a lower rank are nearer to the plain class
    # Returns a class made by `derived`, the same one for the same arguments
    make: Callable[..., type[nn.Module]]
    args: tuple[Any, ...] = ()  # what else `make` gets


OURS = "_mlx_speculation_"
OF_ROUNDS = -1  # the rank of hooks that do nothing outside of rounds

# Re-entrant: a collected generator removes its hooks in whatever thread allocates, and
# so perhaps in the middle of a change. Then they are removed when it is done.
lock = threading.RLock()
_changing = False
_left: list["Hooked"] = []

# By id, modules with hooks: of each rank the hook, and how many owners it has. Not on
# the modules, whose copies would have it too where no class of ours takes it off.
_registry: dict[int, tuple[nn.Module, dict[int, tuple[Hook, int]]]] = {}


@dataclass(slots=True)
class RoundHooks:
    """The hooks of rounds in this process. Changed under `lock` only."""

    # By id, modules with such a hook, and their classes with it and without
    modules: dict[int, tuple[nn.Module, type[nn.Module], type[nn.Module]]] = field(
        default_factory=dict
    )
    on: bool = False  # whether they are on their modules
    forwards: int = 0  # how many forwards of rounds are being built, in all threads

    def turn(self, *, on: bool) -> None:
        """Put them all on their modules, or take them off."""
        with _change():
            self.on = False  # an interrupt leaves what the next round puts right
            for module, within, outside in self.modules.values():
                before, after = (outside, within) if on else (within, outside)
                if type(module) is before:  # not a class that somebody derived
                    object.__setattr__(module, "__class__", after)
            self.on = on


round_hooks = RoundHooks()


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without our hooks.

    A class that somebody else derived from a hooked one is left alone.
    """
    return unhooked(type(module))


def unhooked(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that hooks have made this class from."""
    while "_hooked_from" in vars(kind):
        kind = vars(kind)["_hooked_from"]
    return kind


def made_again(method: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Return a method with the same code, to which these global names mean these."""
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
    """Return a subclass of `kind` that goes by the same name, and copies as `kind`."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    names_of_class = {**names, "__doc__": kind.__doc__, "_hooked_from": kind, **methods}
    names_of_class["__reduce_ex__"] = _reduced
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(kind, name):
            names_of_class[name] = _copying(kind, name)
    return type(kind.__name__, (kind,), names_of_class)


def _reduced(module: nn.Module, protocol: Any) -> Any:
    """Return what `copy` and `pickle` make the plain module from."""
    kind = type(module)  # once: a round of another thread may give it its own back
    bases = (each for each in kind.__mro__ if "_hooked_from" in vars(each))
    hooked = next(bases, kind)
    if hooked is not kind:  # somebody's own class, derived from a hooked one
        return unhooked(hooked).__reduce_ex__(module, protocol)
    twin = _plain_twin(module)
    registered = copyreg.dispatch_table.get(type(twin))
    result = registered(twin) if registered else twin.__reduce_ex__(protocol)
    if isinstance(result, str):
        return result
    make, args, *rest = result
    # Pickle knows copyreg's two functions by their names, and takes them only where the
    # object's class is the one that they name.
    name = getattr(make, "__name__", "")
    if name == "__newobj__":
        make = args[0].__new__
    elif name == "__newobj_ex__":
        plain, new, named = args
        make, args = partial(plain.__new__, plain, *new, **named), ()
    return (make, args, *rest)


def _plain_twin(module: nn.Module) -> nn.Module:
    """Return a plain module with the same parts and attributes, less those of ours."""
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
    """Return a class's own way to copy, which makes a plain module of a hooked one."""

    def method(module: nn.Module, *args: Any) -> Any:
        made = getattr(kind, name)(module, *args)
        if made is not module and "_hooked_from" in vars(type(made)):
            object.__setattr__(made, "__class__", plain_class(made))
            _forget(made)
        return made

    return method


def _forget(module: nn.Module) -> None:
    """Take all attributes of ours off a module."""
    for name in [name for name in vars(module) if name.startswith(OURS)]:
        object.__delattr__(module, name)


class Hooked:
    """Hooks on modules, for the life of their owner.

    Args:
        hooks: modules, each with a hook; one module may come with several.
    """

    def __init__(self, hooks: Iterable[tuple[nn.Module, Hook]]) -> None:
        pairs = list(hooks)
        for module, hook in pairs:  # what fails, fails before anything is changed
            hook.make(plain_class(module), *hook.args)
        self.modules = [module for module, _ in pairs]
        self._pairs = pairs
        with _change():
            for module, hook in pairs:
                _count(module, hook, 1)

    def remove(self) -> None:
        """Take the hooks off, but those that another owner needs."""
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
    """Let nothing else change classes meanwhile, in this thread or another."""
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
    """Count an owner of a hook in or out, and give the module its class."""
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
