"""Copies of single hooked modules, for every way in which a class defines copies."""

import copy
import copyreg
import pickle
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.models.instance_hooks import OF_ROUNDS, Hook, Hooked, round_hooks
from mlx_speculation.models.observer import OBSERVED
from support.models.copies import left_on


class Plain(nn.Module):
    """Holds an array, a part and an attribute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.array([1.0, 2.0])
        self.norm = nn.RMSNorm(4)
        self.name = "theirs"

    def __call__(self, x: mx.array) -> mx.array:
        return x


class WithState(Plain):
    """Defines its state for copies; a copy has the attribute `again`."""

    def __getstate__(self) -> Any:
        return {"state": dict(vars(self))}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state["state"])
        object.__setattr__(self, "again", True)


class Reducing(Plain):
    """Defines `__reduce__`: a copy is made by a call of the class with a name."""

    def __init__(self, name: str = "theirs") -> None:
        super().__init__()
        self.name = name

    def __reduce__(self) -> Any:
        return type(self), ("reduced",), None, None, iter([("weight", self.weight)])


class Copying(Plain):
    """Defines `__copy__` and `__deepcopy__` in the usual way."""

    def __copy__(self) -> "Copying":
        made = type(self).__new__(type(self))
        dict.update(made, self)
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "Copying":
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for key, value in self.items():
            made[key] = copy.deepcopy(value, memo)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class Interned(Plain):
    """Is its own deep copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Interned":
        return self


class WithNew(Plain):
    """Defines `__new__` with an argument."""

    def __new__(cls, size: int) -> "WithNew":
        made = super().__new__(cls)
        object.__setattr__(made, "size", size)
        return made

    def __init__(self, size: int) -> None:
        super().__init__()

    def __getnewargs__(self) -> tuple[int]:
        return (self.size,)


class WithNamed(WithNew):
    """Defines `__new__` with a keyword argument."""

    def __new__(cls, *, size: int) -> "WithNamed":
        return WithNew.__new__(cls, size)  # type: ignore[return-value]

    def __init__(self, *, size: int) -> None:
        super().__init__(size)

    def __getnewargs_ex__(self) -> Any:
        return (), {"size": self.size}


class Slotted(Plain):
    """Has a slot besides its attributes."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "slot", 7)


class Registered(Plain):
    """Is copied by a function that is registered with `copyreg`."""


def again() -> Registered:
    made = Registered()
    made.name = "registered"
    return made


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    copyreg.pickle(Registered, lambda module: (again, ()))
    yield
    del copyreg.dispatch_table[Registered]


MAKE = {
    "plain": Plain,
    "state": WithState,
    "reducing": Reducing,
    "copying": Copying,
    "new": lambda: WithNew(3),
    "named": lambda: WithNamed(size=3),
    "slotted": Slotted,
    "registered": Registered,
}


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def old_pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module, protocol=2))


def in_python(module: Any) -> Any:
    return pickle._loads(pickle._dumps(module))  # type: ignore[attr-defined]


WAYS = [copy.copy, copy.deepcopy, pickled, old_pickled, in_python]


def shown(module: Any) -> Any:
    """Return class, attributes, arrays, slot and left hooks of a module."""
    slot = getattr(module, "slot", None)
    names = {k: v for k, v in vars(module).items() if not isinstance(v, nn.Module)}
    values = {k: v.tolist() for k, v in module.items() if isinstance(v, mx.array)}
    return type(module), names, values, slot, type(module.norm), left_on(module)


def hooked(module: nn.Module, hook: Hook = OBSERVED) -> Hooked:
    return Hooked((each, hook) for each in module.modules())


# Between rounds a module that has only this hook is of its plain class.
OF_A_ROUND = Hook(OF_ROUNDS, OBSERVED.make)


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, pickled, old_pickled, in_python]
)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    ("hook", "in_round"), [(OBSERVED, False), (OF_A_ROUND, False), (OF_A_ROUND, True)]
)
def test_a_copy_is_as_that_of_the_plain_module(
    hook: Hook, in_round: bool, kind: str, way: Any
) -> None:
    module = MAKE[kind]()
    expected = shown(way(module))
    round_hooks.turn(on=in_round)
    owner = hooked(module, hook)
    before = type(module)
    with_hooks = way(module)
    assert type(module) is before
    if way is copy.copy:  # a shallow copy shares the module's parts
        owner.remove()
    assert shown(with_hooks) == expected
    owner.remove()
    assert shown(way(module)) == expected


def test_a_copy_of_two_hooks_is_plain() -> None:
    module = Copying()
    other = Hook(2, OBSERVED.make)
    owner = Hooked([(module, OBSERVED), (module, other)])
    for way in (copy.copy, copy.deepcopy, pickled):
        assert type(way(module)) is Copying
        assert not left_on(way(module))
    owner.remove()


def test_a_module_that_says_it_is_its_own_copy_stays_hooked() -> None:
    module = Interned()
    owner = Hooked([(module, OBSERVED)])
    assert copy.deepcopy(module) is module
    assert type(module) is not Interned
    owner.remove()
    assert type(module) is Interned


@pytest.mark.parametrize("kind", [Plain, Copying])
@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_a_module_that_refers_to_itself_is_copied_once(
    kind: type[Plain], way: Any
) -> None:
    module: Any = kind()
    object.__setattr__(module.norm, "around", module)
    owner = hooked(module)
    made = way(module)
    owner.remove()
    assert made.norm.around is made
    assert made is not module


def test_a_class_that_somebody_derived_from_a_hooked_one_is_copied_as_it_is() -> None:
    module = Plain()
    owner = Hooked([(module, OBSERVED)])
    theirs = type("Theirs", (type(module),), {})
    module.__class__ = theirs
    made = copy.deepcopy(module)
    assert type(made) is theirs
    assert made.weight.tolist() == module.weight.tolist()
    owner.remove()


def test_a_model_s_own_attributes_are_none_of_ours() -> None:
    module: Any = Plain()
    module._hooks = module._owners = None
    owner = Hooked([(module, OBSERVED)])
    made = copy.deepcopy(module)
    owner.remove()
    for each in (module, made):
        assert {"_hooks", "_owners"} <= vars(each).keys()
