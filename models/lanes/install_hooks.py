"""All hooks of a model."""

from collections.abc import Iterator

import mlx.nn as nn

from mlx_speculation.models.instance_hooks import Hook, Hooked
from mlx_speculation.models.introspect.position_table import position_hooks
from mlx_speculation.models.lanes.submit_layers import layer_hooks
from mlx_speculation.models.ops import dispatch
from mlx_speculation.models.ops.latent_attention import absorbing_hooks
from mlx_speculation.models.ops.round_ops import round_op_hooks
from mlx_speculation.models.recurrent.recorder import mixer_hooks


def _hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    yield from position_hooks(model)
    yield from mixer_hooks(model)
    yield from absorbing_hooks(model)
    yield from round_op_hooks(model)
    yield from layer_hooks(model)
    for room in dispatch.ROOMS:
        yield from room.hooks(model)


class ModelHooks(Hooked):
    """The hooks on one model, for the life of their owner.

    Several owners can hook one model. When the last one removes its hooks, the modules
    get their plain classes back.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(_hooks(model))
