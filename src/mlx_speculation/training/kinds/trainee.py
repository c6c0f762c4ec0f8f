"""Trainee: a drafter as the training sees it."""

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

    inputs: list[mx.array]  # what `Trainee.read` returned, for at least the slots
    tokens: mx.array  # ids [rows, slots + depths + first - 1]
    depths: int  # how many tokens are drafted
    # To draft from, int32 [rows, n]; None: all. Drafters of blocks alone get some.
    slots: mx.array | None = None
    checkpoint: bool = False  # gradients compute each depth again


class Trainee(Protocol):
    """A drafter that is trained.

    Attributes:
        kind: as `TrainOptions` names it.
        first: slot i at depth 0 drafts token i + `first`.
        most: the most tokens that it drafts in a row; None: any number.
        fading: what a depth counts over the one before.
    """

    kind: str
    first: int
    most: int | None
    fading: float

    @property
    def module(self) -> nn.Module:
        """Holds the weights that are trained, and perhaps frozen ones."""
        ...

    @property
    def taps(self) -> HiddenStates | None:
        """On the target, for what the drafter reads; None: it reads nothing."""
        ...

    @property
    def ids(self) -> mx.array | None:
        """The target's ids of its logits, uint32 [n]; None: all."""
        ...

    def read(self, states: States) -> list[mx.array]:
        """Return what it reads of a forward, each [rows, positions, dim]."""
        ...

    def run(self, text: Recorded, read: Read[Made]) -> list[Made]:
        """Draft from slots of recorded text; see `unroll` and `many_blocks`.

        Args:
            text: the text, with what is read of it.
            read: called with each depth and its logits [rows, slots, ids].
        """
        ...

    def save(self, folder: Path, bits: int | None) -> None:
        """Write its files, as those who draft with it load them.

        Args:
            folder: exists; files of the same names are replaced.
            bits: of its matrices; None: as 16-bit numbers.
        """
        ...

    def source(self, folder: Path) -> Any:
        """Return what a generator takes as its draft, from the files in a folder."""
        ...


def depths_of(trainee: Trainee, wanted: int) -> int:
    """Return how many tokens it drafts in a row where so many are wanted."""
    return wanted if trainee.most is None else min(wanted, trainee.most)


def slots_of(trainee: Trainee, tokens: mx.array, depths: int) -> int:
    """Return how many slots rows of tokens have."""
    return int(tokens.shape[1]) - depths - trainee.first + 1
