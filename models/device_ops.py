"""Operations of a room for one kind of machine, which replace mlx's and mlx-lm's.

`models/cpu` and `models/cuda` each make one `DeviceOps`. `models.lanes.install_hooks`
registers them, and `models.ops` uses the registered ones. No other module knows the
rooms. mlx's own operations run where no room serves, so a text is the same without the
rooms.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.instance_hooks import Hook
from mlx_speculation.models.round_context import Device


class RoundOp(NamedTuple):
    """A replacement for the value of a global name in a layer's code."""

    theirs: Any  # the value that the name has to have, else it is not replaced
    # The value in a round. A function checks its arguments, and calls `theirs` if it
    # does not serve them
    ours: Any
    # If the value is a module: the names that code has to use of it; empty: any code
    parts: frozenset[str] = frozenset()
    # Names of the path to `parts` in the module, if they are not at its top
    within: frozenset[str] = frozenset()


@runtime_checkable
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


@runtime_checkable
class CompiledForward(Protocol):
    """The compiled forward of one draft model."""

    def serves(self, caches: Sequence[Any], count: int) -> bool:
        """Return whether `forward` can feed so many tokens to these caches."""
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
        activations: names of round ops that hooks of other kinds may use in copied code
            too. These check by themselves whether they serve.
        hooks: yields the room's own hooks on a model; none if they do not serve.
        attention_dims: head dimensions for which the room has attention of a few rows
            that needs no plan for each number of keys.
        gated_delta: called with a q and a v. Returns a function that runs a block of
            gated delta steps of these shapes, with the arguments (q, k, v, g, beta,
            state, mask); None: the room has none.
        compile_draft: returns the compiled and tested forward of a draft model, or
            raises `UnsupportedModelError`.
        stream_resources: a context that holds resources while a stream of a model runs.
    """

    device: Device
    serves: Callable[[], bool]
    round_ops: Mapping[str, RoundOp]
    activations: frozenset[str] = field(default_factory=frozenset)
    hooks: Callable[[nn.Module], Iterator[tuple[nn.Module, Hook]]] = _no_hooks
    attention_dims: frozenset[int] = field(default_factory=frozenset)
    gated_delta: Callable[[mx.array, mx.array], RunBlock | None] | None = None
    compile_draft: Callable[[nn.Module], CompiledForward] | None = None
    stream_resources: Callable[[nn.Module], AbstractContextManager[None]] | None = None
