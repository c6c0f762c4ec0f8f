"""Operations of a room for one kind of machine, in place of mlx's and mlx-lm's own.

`models/cpu` and `models/cuda` each make one `DeviceOps`. Who installs hooks lists them
(`models.lanes.install_hooks`), and `models.ops` asks those that are listed; nothing
else knows the rooms. What no room serves goes the stock way, so that a text is the same
without them.
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
    """Meaning of a global name in a layer's code, and its meaning in a round."""

    theirs: Any  # what the name has to mean for `ours` to take its place
    ours: Any  # asks for itself whether it serves, and calls `theirs` where it does not
    # Of a module, those names of it that matter; empty: the name itself does
    parts: frozenset[str] = frozenset()
    # Where in the module they are, if not at its top
    within: frozenset[str] = frozenset()


@runtime_checkable
class Block(Protocol):
    """A block of rows that a scan has run at once."""

    @property
    def y(self) -> mx.array:
        """Results of the scan for each row, [batch, rows, heads, Dv]."""
        ...

    def after(self, keep: int) -> mx.array:
        """Return the state after the first `keep` rows, from 1."""
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
        device: what `device_of_round` returns where its round ops serve.
        serves: whether they serve here and now; compiles what they need.
        round_ops: by the global name in a layer's code.
        activations: which of these may also stand in code that is made again for
            another reason: they ask for themselves, whatever `serves` has returned.
        hooks: yields the room's own hooks on a model, none where they do not serve.
        attention_dims: head dimensions for which the room has attention of a few rows
            that plans nothing by the number of keys.
        gated_delta: returns what runs a block of gated delta steps, called with
            (q, k, v, g, beta, state, mask), for the shapes of a q and a v; None: the
            room has nothing for them here.
        compile_draft: returns a draft model's forward, compiled and tried, or raises
            `UnsupportedModelError`.
        stream_resources: holds what serves the streams of a model, while one runs.
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
