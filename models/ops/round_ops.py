"""Round ops in place of functions that a model's layers call, while a round runs.

mlx-lm's layers call attention and activations by global names. A hooked layer runs its
own code, made again with other functions in these names: those of the listed room that
serves here (`models.device_ops`). Each asks whether it serves, and calls what it
replaces where it does not. Outside of rounds, and where a name has come to mean
something else, the layer's own code runs.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import mlx.nn as nn

from mlx_speculation.models.device_ops import DeviceOps, RoundOp
from mlx_speculation.models.instance_hooks import (
    OF_ROUNDS,
    Hook,
    derived,
    made_again,
    plain_class,
)
from mlx_speculation.models.ops.dispatch import registered
from mlx_speculation.models.round_context import device_of_round


def _called(method: Any, round_ops: Mapping[str, RoundOp]) -> tuple[str, ...]:
    """Return the names in a method's code that have a round op."""
    if not isinstance(method, FunctionType):
        return ()
    names = set(method.__code__.co_names)
    return tuple(
        name
        for name, op in round_ops.items()
        if name in names
        and method.__globals__.get(name) is op.theirs
        and op.within <= names
        and (not op.parts or op.parts & names)
    )


@functools.cache
def _with_round_ops(kind: Any, room: DeviceOps) -> type[nn.Module]:
    """Return a class whose code calls the round ops of a room, in a round."""
    original: FunctionType = kind.__call__
    names = {name: room.round_ops[name] for name in _called(original, room.round_ops)}
    means, device = original.__globals__, room.device
    again = made_again(original, {name: each.ours for name, each in names.items()})
    theirs = [(name, each.theirs) for name, each in names.items()]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current: Any = kind.__call__
        ours = current is original and device_of_round() == device
        for name, their in theirs:
            ours = ours and means[name] is their
        return (again if ours else current)(self, *args, **kwargs)

    return derived(kind, {"__call__": call})


def activations_of(method: Any) -> dict[str, Callable[..., Any]]:
    """Return activations that ask for themselves whether they serve, by their names.

    For code that is made again for another reason.
    """
    return {
        name: room.round_ops[name].ours
        for room in registered()
        for name in room.activations.intersection(_called(method, room.round_ops))
    }


def round_op_hooks(
    model: nn.Module, but: frozenset[tuple[str, str]]
) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer whose own code calls what has a round op, with its hook.

    Args:
        model: any model.
        but: (module, class) of layers whose code is made again by other hooks.
    """
    room = next((room for room in registered() if room.serves()), None)
    if room is None:
        return
    for _, module in model.named_modules():
        kind: Any = plain_class(module)
        known = (kind.__module__, kind.__name__) in but
        if not known and _called(kind.__call__, room.round_ops):
            yield module, Hook(OF_ROUNDS, _with_round_ops, (room,))
