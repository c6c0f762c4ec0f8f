"""Attention of a round, in place of the function that a model's layers call.

mlx-lm's layers call attention by a global name. In a round, a hooked layer runs a copy
of its code in which this name is bound to `DeviceOps.attend` (`models.device_ops`). A
layer gets no hook if other code has already bound this name to another function.
"""

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_speculation.models.device_ops import DeviceOps
from mlx_speculation.models.instance_hooks import Hook, derived, made_again, plain_class
from mlx_speculation.models.ops import dispatch
from mlx_speculation.models.ops.latent_attention import ATTENTIONS
from mlx_speculation.models.round_context import device_of_round

_RANK = -1
_NAME = "scaled_dot_product_attention"


def _attends(method: Any) -> bool:
    """Return whether a method's code calls mlx-lm's attention."""
    return (
        isinstance(method, FunctionType)
        and _NAME in method.__code__.co_names
        and method.__globals__.get(_NAME) is scaled_dot_product_attention
    )


@functools.cache
def _attending(
    kind: type[nn.Module], method: FunctionType, room: DeviceOps
) -> type[nn.Module]:
    """Return a class whose `__call__` uses `room.attend` in rounds on its device."""
    again = made_again(method, {_NAME: room.attend})

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours = device_of_round() == room.device
        return (again if ours else method)(self, *args, **kwargs)

    return derived(kind, {"__call__": call})


def round_op_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    """Yield each layer whose code calls attention, with its hook.

    Attention over latents has hooks of its own.
    """
    room = next((room for room in dispatch.ROOMS if room.serves()), None)
    if room is None:
        return
    for _, module in model.named_modules():
        kind: Any = plain_class(module)
        over_latents = (kind.__module__, kind.__name__) in ATTENTIONS
        if _attends(kind.__call__) and not over_latents:
            yield module, Hook(_RANK, _attending, (kind.__call__, room))
