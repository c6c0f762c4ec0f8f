"""Trainee, the base class of drafters in training."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_speculation.models import HiddenStates, States
from mlx_speculation.training.unroll import Made, Read, Recorded


class Trainee(ABC):
    """A drafter in training; a slot is a position of a text from which it drafts."""

    kind: str  # `TrainOptions.kind`
    module: Any  # the drafter; some of its weights can be frozen
    taps: HiddenStates | None = None  # the target's states to read; None: no states
    ids: mx.array | None = None  # target's id by logits column, uint32 [n]; None: all
    first = 2  # slot i at depth 0 drafts token i + `first`
    most: int | None = None  # maximum number of tokens drafted from a slot; None: any
    # Weight of a depth in the loss, relative to the depth before
    fading = 0.8  # as in EAGLE-3

    @abstractmethod
    def read(self, states: States) -> list[mx.array]:
        """Return the drafter's inputs from `states`, each [rows, positions, dim]."""

    @abstractmethod
    def run(self, text: Recorded, read: Read[Made]) -> list[Made]:
        """Draft from slots of recorded text.

        Calls the argument `read` with each depth and its logits [rows, slots, ids], and
        returns the results of these calls.
        """

    @abstractmethod
    def save(self, folder: Path, bits: int | None) -> None:
        """Write the drafter's files into an existing folder; they replace earlier ones.

        `bits`: bits of the drafter's matrices; None: 16-bit numbers.
        """

    def depths(self, wanted: int) -> int:
        """Return the number of tokens to draft from a slot, at most `wanted`."""
        return wanted if self.most is None else min(wanted, self.most)

    def slots(self, tokens: mx.array, depths: int) -> int:
        """Return the number of slots in each row of tokens."""
        return int(tokens.shape[1]) - depths - self.first + 1
