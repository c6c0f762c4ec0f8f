"""Hooks of several owners on one module, in whatever order they come and leave."""

import functools
from itertools import permutations, product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.models.instances import Hook, Hooked, derived, plain_class

HEARD: list[str] = []


@functools.cache
def saying(kind: type[nn.Module], name: str) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        HEARD.append(name)
        return kind.__call__(self, *args, **kwargs)

    return derived(kind, {"__call__": call})


def heard(module: nn.Module) -> list[str]:
    HEARD.clear()
    module(mx.zeros((1, 4)))
    return list(HEARD)


INNER, OUTER = Hook(0, saying, ("inner",)), Hook(1, saying, ("outer",))


@pytest.mark.parametrize("hooks", list(product((INNER, OUTER), repeat=4)))
@pytest.mark.parametrize("leaving", list(permutations(range(4))))
def test_the_class_follows_from_the_hooks_that_are_left(
    hooks: tuple[Hook, ...], leaving: tuple[int, ...]
) -> None:
    norm = nn.RMSNorm(4)
    owners = [Hooked([(norm, hook)]) for hook in hooks]
    left = list(hooks)
    for index in leaving:
        ranks = {hook.rank for hook in left}
        assert heard(norm) == [("inner", "outer")[rank] for rank in sorted(ranks)][::-1]
        owners[index].remove()
        owners[index].remove()
        left.remove(hooks[index])
    assert type(norm) is nn.RMSNorm
    assert "_hooks" not in vars(norm)


def test_of_one_rank_the_first_hook_counts_until_its_last_owner_leaves() -> None:
    norm = nn.RMSNorm(4)
    first = Hooked([(norm, INNER)])
    second = Hooked([(norm, Hook(0, saying, ("another",)))])
    assert heard(norm) == ["inner"]
    first.remove()
    assert heard(norm) == ["inner"]
    second.remove()
    assert type(norm) is nn.RMSNorm


def test_a_hook_that_fails_leaves_no_module_changed() -> None:
    def failing(kind: type[nn.Module]) -> type[nn.Module]:
        raise ValueError(kind.__name__)

    one, other = nn.RMSNorm(4), nn.LayerNorm(4)
    with pytest.raises(ValueError, match="LayerNorm"):
        Hooked([(one, INNER), (other, Hook(0, failing))])
    assert type(one) is nn.RMSNorm


def test_a_class_that_somebody_derived_from_a_hooked_one_stays() -> None:
    norm = nn.RMSNorm(4)
    owner = Hooked([(norm, INNER)])
    theirs = type("Theirs", (type(norm),), {})
    norm.__class__ = theirs
    assert plain_class(norm) is theirs
    owner.remove()
    assert type(norm) is theirs
