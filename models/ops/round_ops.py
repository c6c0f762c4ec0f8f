"""Round ops: functions that replace those that a model's layers call during a round.

The code of mlx-lm's layers calls attention and activations by global names. A hooked
layer runs a copy of its code, in which these names are bound to the round ops of the
room that serves this machine (`models.device_ops`). A round op checks its arguments,
and calls the function that it replaces if it does not serve them. The original code
runs outside of rounds. A name that other code has rebound before the hook was made gets
no round op.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import mlx.nn as nn

from mlx_speculation.models.device_ops import DeviceOps, RoundOp
from mlx_speculation.models.instance_hooks import Hook, derived, made_again, plain_class
from mlx_speculation.models.ops import dispatch
from mlx_speculation.models.round_context import device_of_round

_RANK = -1


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
        and (not op.parts or op.parts & names)
    )


@functools.cache
def _with_round_ops(
    kind: type[nn.Module], method: FunctionType, room: DeviceOps, names: tuple[str, ...]
) -> type[nn.Module]:
    """Return a class whose `__call__` calls the round ops of a room during a round."""
    again = made_again(method, {name: room.round_ops[name].ours for name in names})

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours = device_of_round() == room.device
        return (again if ours else method)(self, *args, **kwargs)

    return derived(kind, {"__call__": call})


def activations_of(method: Any) -> dict[str, Callable[..., Any]]:
    """Return round ops for the activations that a method calls, by their names.

    Hooks that copy a layer's code for another reason use them.
    """
    return {
        name: room.round_ops[name].ours
        for room in dispatch.ROOMS
        for name in room.activations.intersection(_called(method, room.round_ops))
    }


def round_op_hooks(
    model: nn.Module, but: frozenset[tuple[str, str]]
) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer whose code calls a function that has a round op, and its hook.

    Args:
        model: any model.
        but: (module, class) of layers whose code other hooks copy.
    """
    room = next((room for room in dispatch.ROOMS if room.serves()), None)
    if room is None:
        return
    for _, module in model.named_modules():
        kind: Any = plain_class(module)
        known = (kind.__module__, kind.__name__) in but
        names = _called(kind.__call__, room.round_ops)
        if names and not known:
            yield module, Hook(_RANK, _with_round_ops, (kind.__call__, room, names))
