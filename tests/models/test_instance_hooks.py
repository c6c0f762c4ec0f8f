"""Hooks of several owners on one module, added and removed in any order."""

import functools
import gc
import threading
import weakref
from contextlib import suppress
from itertools import permutations, product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.models import instance_hooks
from mlx_speculation.models.instance_hooks import (
    OF_ROUNDS,
    Hook,
    Hooked,
    derived,
    plain_class,
    round_hooks,
)
from mlx_speculation.models.round_context import plain_step, rows_of_a_round
from support.each import each
from support.models.copies import left_on

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


@pytest.fixture(autouse=True)
def _no_round_before() -> None:
    round_hooks.turn(on=False)


OF_A_ROUND = Hook(OF_ROUNDS, saying, ("of a round",))
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
    assert not left_on(norm)
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


def in_a_round(module: nn.Module) -> list[str]:
    with rows_of_a_round():
        return active_hooks(module)


def in_a_plain_step(module: nn.Module) -> list[str]:
    with plain_step(1):
        return active_hooks(module)


def test_a_hook_of_rounds_is_on_from_a_round_to_the_next_plain_step() -> None:
    norm = nn.RMSNorm(4)
    owner = Hooked([(norm, OF_A_ROUND)])
    assert type(norm) is nn.RMSNorm
    for _ in range(2):
        assert in_a_plain_step(norm) == []
        assert in_a_round(norm) == ["of a round"]
        assert active_hooks(norm) == ["of a round"]  # stays on for the next round
        assert in_a_round(norm) == ["of a round"]
    owner.remove()
    assert type(norm) is nn.RMSNorm
    assert in_a_round(norm) == []


@each(
    before=[in_a_plain_step, in_a_round],
    leaving=list(permutations(range(3))),
    hooks=list(permutations((OF_A_ROUND, INNER, OUTER))),
)
def test_other_hooks_come_and_leave_whether_those_of_rounds_are_on_or_off(
    hooks: tuple[Hook, ...], leaving: tuple[int, ...], before: Any
) -> None:
    norm = nn.RMSNorm(4)

    def check(installed: set[str]) -> None:
        order = [each for each in ("outer", "inner", "of a round") if each in installed]
        plain = [each for each in order if each != "of a round"]
        assert active_hooks(norm) == (order if before is in_a_round else plain)
        assert in_a_plain_step(norm) == plain
        assert in_a_round(norm) == order
        before(norm)

    before(norm)
    owners, installed = [], set()
    for hook in hooks:
        owners.append(Hooked([(norm, hook)]))
        installed |= set(hook.args)
        check(installed)
    for index in leaving:
        owners[index].remove()
        installed -= set(hooks[index].args)
        check(installed)
    assert type(norm) is nn.RMSNorm


def test_a_plain_step_of_another_thread_leaves_a_round_its_hooks() -> None:
    norm, elsewhere = nn.RMSNorm(4), nn.RMSNorm(4)
    owner = Hooked([(norm, OF_A_ROUND)])

    def plain_step() -> None:
        other = threading.Thread(target=in_a_plain_step, args=(elsewhere,))
        other.start()
        other.join()

    with rows_of_a_round():
        with rows_of_a_round():
            plain_step()
        plain_step()  # the outer round is still being built
        assert active_hooks(norm) == ["of a round"]
    with suppress(ZeroDivisionError), rows_of_a_round():
        raise ZeroDivisionError
    plain_step()
    assert active_hooks(norm) == []
    owner.remove()


def test_a_round_and_a_plain_step_leave_a_class_that_somebody_derived() -> None:
    norm = nn.RMSNorm(4)
    owner = Hooked([(norm, OF_A_ROUND)])
    for before in (in_a_plain_step, in_a_round):
        before(norm)
        kind = type(norm)
        theirs = type("Theirs", (kind,), {})
        norm.__class__ = theirs
        in_a_round(norm)
        in_a_plain_step(norm)
        assert type(norm) is theirs
        norm.__class__ = kind
    in_a_plain_step(norm)
    owner.remove()
    assert type(norm) is nn.RMSNorm


@pytest.mark.parametrize("change", ["comes", "leaves", "turns on", "turns off"])
def test_an_owner_that_is_collected_in_the_middle_of_a_change_leaves_after_it(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = [nn.RMSNorm(4) for _ in range(3)]
    leaving: list[Hooked] = []

    def collecting(kind: type[nn.Module]) -> type[nn.Module]:
        while leaving:
            leaving.pop().remove()
        return kind

    def kind_of(module: nn.Module) -> type[nn.Module]:
        return collecting(type(module))

    collected = [Hooked([(norm, OF_A_ROUND), (norm, INNER)]) for norm in norms]
    stays = Hooked([(norm, Hook(1, collecting)) for norm in norms])
    if change == "turns off":
        in_a_round(norms[0])
    leaving += collected
    if change == "comes":
        Hooked([(norm, OUTER) for norm in norms]).remove()
    elif change == "leaves":
        other = Hooked([(norm, INNER) for norm in norms])
        leaving += collected
        other.remove()
    else:
        monkeypatch.setattr(instance_hooks, "type", kind_of, raising=False)
        (in_a_plain_step if change == "turns off" else in_a_round)(norms[0])
        monkeypatch.undo()
    assert not leaving
    assert [in_a_round(norm) for norm in norms] == [[], [], []]
    stays.remove()
    assert [type(norm) for norm in norms] == [nn.RMSNorm] * 3
    assert not any(left_on(norm) for norm in norms)
    assert not instance_hooks._registry.keys() & {id(norm) for norm in norms}


def test_a_module_whose_owners_have_left_is_not_kept() -> None:
    norm = nn.RMSNorm(4)
    gone = weakref.ref(norm)
    owners = [Hooked([(norm, OF_A_ROUND), (norm, INNER)]) for _ in range(2)]
    for owner in owners:
        owner.remove()
    del owner, owners, norm
    gc.collect()
    assert gone() is None
