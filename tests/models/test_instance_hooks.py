"""Hooks of several owners on one module, added and removed in any order."""

import functools
import gc
import weakref
from itertools import permutations, product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.models import instance_hooks
from mlx_speculation.models.instance_hooks import Hook, Hooked, derived, plain_class
from support.each import each

HEARD: list[str] = []


@functools.cache
def saying(kind: type[nn.Module], name: str) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        HEARD.append(name)
        return kind.__call__(self, *args, **kwargs)

    return derived(kind, {"__call__": call})


def active_hooks(module: nn.Module) -> list[str]:
    HEARD.clear()
    module(mx.zeros((1, 4)))
    return list(HEARD)


INNER, OUTER = Hook(0, saying, ("inner",)), Hook(1, saying, ("outer",))


@each(
    leaving=list(permutations(range(4))), hooks=list(product((INNER, OUTER), repeat=4))
)
def test_the_class_follows_from_the_hooks_that_are_left(
    hooks: tuple[Hook, ...], leaving: tuple[int, ...]
) -> None:
    norm = nn.RMSNorm(4)
    owners = [Hooked([(norm, hook)]) for hook in hooks]
    left = list(hooks)
    for index in leaving:
        ranks = {hook.rank for hook in left}
        assert (
            active_hooks(norm)
            == [("inner", "outer")[rank] for rank in sorted(ranks)][::-1]
        )
        owners[index].remove()
        owners[index].remove()
        left.remove(hooks[index])
    assert type(norm) is nn.RMSNorm
    assert id(norm) not in instance_hooks._registry


def test_of_one_rank_the_first_hook_counts_until_its_last_owner_leaves() -> None:
    norm = nn.RMSNorm(4)
    first = Hooked([(norm, INNER)])
    second = Hooked([(norm, Hook(0, saying, ("another",)))])
    assert active_hooks(norm) == ["inner"]
    first.remove()
    assert active_hooks(norm) == ["inner"]
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


@pytest.mark.parametrize("change", ["comes", "leaves"])
def test_an_owner_that_is_collected_in_the_middle_of_a_change_leaves_after_it(
    change: str,
) -> None:
    norms = [nn.RMSNorm(4) for _ in range(3)]
    leaving: list[Hooked] = []

    def collecting(kind: type[nn.Module]) -> type[nn.Module]:
        while leaving:
            leaving.pop().remove()
        return kind

    collected = [Hooked([(norm, OUTER), (norm, INNER)]) for norm in norms]
    stays = Hooked([(norm, Hook(2, collecting)) for norm in norms])
    if change == "comes":
        leaving += collected
        Hooked([(norm, INNER) for norm in norms]).remove()
    else:
        other = Hooked([(norm, INNER) for norm in norms])
        leaving += collected
        other.remove()
    assert not leaving
    assert [active_hooks(norm) for norm in norms] == [[], [], []]
    stays.remove()
    assert [type(norm) for norm in norms] == [nn.RMSNorm] * 3
    assert not instance_hooks._registry.keys() & {id(norm) for norm in norms}


def test_a_module_whose_owners_have_left_is_not_kept() -> None:
    norm = nn.RMSNorm(4)
    gone = weakref.ref(norm)
    owners = [Hooked([(norm, OUTER), (norm, INNER)]) for _ in range(2)]
    for owner in owners:
        owner.remove()
    del owner, owners, norm
    gc.collect()
    assert gone() is None
