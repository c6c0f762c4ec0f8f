"""Trainee, the interface of a drafter for training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models import HiddenStates, States
from mlx_speculation.training.unroll import Made, Read

FADING = 0.8  # as in EAGLE-3


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Recorded text to draft from."""

    inputs: list[mx.array]  # the result of `Trainee.read`, for at least all slots
    tokens: mx.array  # ids [rows, slots + depths + first - 1]
    depths: int  # tokens drafted from each slot
    # Slots to draft from, int32 [rows, n]; None: all. Only block drafters get some.
    slots: mx.array | None = None
    checkpoint: bool = False  # whether the backward pass recomputes each depth


class Trainee(Protocol):
    """A drafter that is trained.

    Attributes:
        kind: the kind of `TrainOptions`.
        first: slot i at depth 0 drafts token i + `first`.
        most: the most consecutive tokens that it drafts; None: any number.
        fading: the weight of a depth in the loss, relative to the depth before.
    """

    kind: str
    first: int
    most: int | None
    fading: float

    @property
    def module(self) -> nn.Module:
        """The module with the trained weights; it may also have frozen ones."""
        ...

    @property
    def taps(self) -> HiddenStates | None:
        """Hidden states of the target that the drafter reads; None: it reads none."""
        ...

    @property
    def ids(self) -> mx.array | None:
        """The target's id of each column of the logits, uint32 [n]; None: all ids."""
        ...

    def read(self, states: States) -> list[mx.array]:
        """Return the drafter's inputs from a forward, each [rows, positions, dim]."""
        ...

    def run(self, text: Recorded, read: Read[Made]) -> list[Made]:
        """Draft from slots of recorded text; see `unroll` and `many_blocks`.

        Args:
            text: the text and the drafter's inputs.
            read: called with each depth and its logits [rows, slots, ids].
        """
        ...

    def save(self, folder: Path, bits: int | None) -> None:
        """Write the drafter's files, ready to be loaded for drafting.

        Args:
            folder: an existing folder; files of the same names are replaced.
            bits: bits of its matrices; None: 16-bit numbers.
        """
        ...

    def source(self, folder: Path) -> Any:
        """Return the value of `draft=` for a generator, given the folder of `save`."""
        ...


def depths_of(trainee: Trainee, wanted: int) -> int:
    """Return the number of tokens to draft from a slot, at most `wanted`."""
    return wanted if trainee.most is None else min(wanted, trainee.most)


def slots_of(trainee: Trainee, tokens: mx.array, depths: int) -> int:
    """Return the number of slots in rows of tokens."""
    return int(tokens.shape[1]) - depths - trainee.first + 1
