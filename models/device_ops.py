"""Operations for one kind of machine, which replace those of mlx and mlx-lm.

A room is a package of such operations: `models/cpu` or `models/cuda`. Each room makes
one `DeviceOps`, and only `models.ops` imports the rooms. If no room supports a machine,
mlx's own operations run, and the text is the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instance_hooks import Hook
from mlx_speculation.models.round_context import Device


class Block(Protocol):
    """The result of a scan over a block of rows, which are consecutive positions."""

    @property
    def y(self) -> mx.array:
        """The result of each row, [batch, rows, heads, Dv]."""
        ...

    def after(self, keep: int) -> mx.array:
        """Return the state after the first `keep` rows, at least 1."""
        ...


RunBlock = Callable[..., Block]


class CompiledForward(Protocol):
    """The compiled forward of one draft model."""

    def serves(self, caches: Sequence[Any], count: int) -> bool:
        """Return whether `forward` can feed `count` tokens to these caches."""
        ...

    def forward(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Feed tokens [n], write to the caches, return logits [n, vocab], lazy."""
        ...


def _no_hooks(_: nn.Module) -> Iterator[tuple[nn.Module, Hook]]:
    return iter(())


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOps:
    """Operations of one room.

    Attributes:
        device: the result of `device_of_round` in rounds that use the operations.
        serves: returns whether `attend` can be used now, and compiles its kernels.
        attend: replaces mlx-lm's `scaled_dot_product_attention` in rounds, and calls it
            for arguments that the room does not support.
        hooks: yields the room's own hooks on a model, if this machine supports them.
        attention_dims: head dimensions for which the room's attention over a few rows
            does without cuDNN, which makes a plan for each new number of keys.
        gated_delta: takes q and v, and returns a function of (q, k, v, g, beta, state)
            that runs a block of gated delta steps of these shapes. It returns None
            instead if these shapes are not supported, or not in this round. The field
            is None if the room has no such function.
        compile_draft: returns the compiled and tested forward of a draft model, or
            raises `UnsupportedModelError`.
    """

    device: Device
    serves: Callable[[], bool]
    attend: Callable[..., mx.array]
    hooks: Callable[[nn.Module], Iterator[tuple[nn.Module, Hook]]] = _no_hooks
    attention_dims: frozenset[int] = field(default_factory=frozenset)
    gated_delta: Callable[[mx.array, mx.array], RunBlock | None] | None = None
    compile_draft: Callable[[nn.Module], CompiledForward] | None = None
