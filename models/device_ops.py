"""Operations for one kind of machine, which replace those of mlx and mlx-lm.

The packages `models/cpu` and `models/cuda`, called rooms, each make one `DeviceOps`.
`models.ops` chooses among them, and no other module knows them. If no room serves a
machine, mlx's own operations run, and the text is the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instance_hooks import Hook
from mlx_speculation.models.round_context import Device


class RoundOp(NamedTuple):
    """A replacement for the value of a global name in a layer's code."""

    theirs: Any  # the expected value of the name; another value is not replaced
    # The value in a round. A function checks its arguments, and calls `theirs` if it
    # does not serve them
    ours: Any
    # If the value is a module: code is changed only if it uses one of these names of
    # the module; empty: any code
    parts: frozenset[str] = frozenset()


class Block(Protocol):
    """The result of a scan over a block of rows."""

    @property
    def y(self) -> mx.array:
        """Results of the scan for each row, [batch, rows, heads, Dv]."""
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
        device: the value of `device_of_round` in rounds that use the round ops.
        serves: returns whether the round ops serve this machine now; compiles the
            kernels that they need.
        round_ops: the round ops, by the global name in a layer's code.
        activations: names of round ops that other kinds of hooks may use in copied code
            too. These ops check by themselves whether they serve.
        hooks: yields the room's own hooks on a model, if they serve.
        attention_dims: head dimensions for which the room has attention over a few rows
            without a plan for each number of keys.
        gated_delta: called with a q and a v. Returns a function that runs a block of
            gated delta steps of these shapes, with the arguments (q, k, v, g, beta,
            state); None: the room has none.
        compile_draft: returns the compiled and tested forward of a draft model, or
            raises `UnsupportedModelError`.
    """

    device: Device
    serves: Callable[[], bool]
    round_ops: Mapping[str, RoundOp]
    activations: frozenset[str] = field(default_factory=frozenset)
    hooks: Callable[[nn.Module], Iterator[tuple[nn.Module, Hook]]] = _no_hooks
    attention_dims: frozenset[int] = field(default_factory=frozenset)
    gated_delta: Callable[[mx.array, mx.array], RunBlock | None] | None = None
    compile_draft: Callable[[nn.Module], CompiledForward] | None = None
