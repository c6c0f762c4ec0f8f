"""Copies of single hooked modules, for every way in which a class defines copies."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.models.instance_hooks import Hook, Hooked
from mlx_speculation.models.observer import OBSERVED


class Plain(nn.Module):
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
    """Defines `__reduce__`: the class is called with a name to make a copy."""

    def __init__(self, name: str = "theirs") -> None:
        super().__init__()
        self.name = name

    def __reduce__(self) -> Any:
        return type(self), ("reduced",), None, None, iter([("weight", self.weight)])


class WithNew(Plain):
    def __new__(cls, size: int) -> "WithNew":
        made = super().__new__(cls)
        object.__setattr__(made, "size", size)
        return made

    def __init__(self, size: int) -> None:
        super().__init__()

    def __getnewargs__(self) -> tuple[int]:
        return (self.size,)


MAKE: dict[str, Callable[[], Plain]] = {
    "plain": Plain,
    "state": WithState,
    "reducing": Reducing,
    "new": lambda: WithNew(3),
}


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def old_pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module, protocol=2))


def in_python(module: Any) -> Any:
    return pickle._loads(pickle._dumps(module))  # type: ignore[attr-defined]


WAYS = [copy.copy, copy.deepcopy, pickled, old_pickled, in_python]


def shown(module: Any) -> Any:
    names = {k: v for k, v in vars(module).items() if not isinstance(v, nn.Module)}
    values = {k: v.tolist() for k, v in module.items() if isinstance(v, mx.array)}
    return type(module), names, values, type(module.norm)


def observed(module: nn.Module) -> Hooked:
    return Hooked((each, OBSERVED) for each in module.modules())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MAKE)
def test_a_copy_is_as_that_of_the_plain_module(kind: str, way: Any) -> None:
    module = MAKE[kind]()
    expected = shown(way(module))
    owner = observed(module)
    before = type(module)
    with_hooks = way(module)
    assert type(module) is before
    if way is copy.copy:  # a shallow copy shares the module's parts
        owner.remove()
    assert shown(with_hooks) == expected
    owner.remove()
    assert shown(way(module)) == expected


def test_a_copy_of_two_hooks_is_plain() -> None:
    module = Plain()
    other = Hook(2, OBSERVED.make)
    owner = Hooked([(module, OBSERVED), (module, other)])
    for way in (copy.copy, copy.deepcopy, pickled):
        assert type(way(module)) is Plain
    owner.remove()


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_a_module_that_refers_to_itself_is_copied_once(way: Any) -> None:
    module: Any = Plain()
    object.__setattr__(module.norm, "around", module)
    owner = observed(module)
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
