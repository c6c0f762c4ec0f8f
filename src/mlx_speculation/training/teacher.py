"""The target as the teacher: the drafter's inputs, and the distributions to learn.

The target runs outside of the differentiated function, so that it keeps its fast
kernels and no graph of its forward is stored.
"""

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models import check_positions, position_table
from mlx_speculation.training.kinds.trainee import Trainee
from mlx_speculation.training.loss import Teacher


class Lesson(NamedTuple):
    """Output of a forward of the target."""

    inputs: list[mx.array]  # the drafter's inputs, each [rows, positions, dim]
    logits: mx.array  # of all ids, [rows, positions, vocab]


class TargetModel:
    """A target whose weights do not change."""

    def __init__(self, model: nn.Module, trainee: Trainee) -> None:
        self._model, self._trainee = model, trainee
        self._positions = position_table(model)
        self._columns: mx.array | None = None

    def lesson(self, tokens: mx.array) -> Lesson:
        """Run the target over rows of ids [rows, positions].

        Raises:
            InvalidRequestError: the rows are longer than the target's position table.
        """
        check_positions(tokens.shape[1], 0, self._positions)
        model, taps = self._model, self._trainee.taps
        if taps is None:
            return Lesson([], model(tokens))
        with taps.collect() as states:
            logits = model(tokens)
        return Lesson(self._trainee.read(states), logits)

    def teacher(self, logits: mx.array) -> Teacher:
        """Return the distributions to learn, from the target's logits of all ids."""
        likeliest = mx.argmax(logits, axis=-1).astype(mx.int32)
        ids = self._trainee.ids
        if ids is None:
            return Teacher(logits, likeliest)
        if self._columns is None:
            columns = mx.full((logits.shape[-1],), -1, mx.int32)
            columns[ids] = mx.arange(ids.size, dtype=mx.int32)
            self._columns = columns
        return Teacher(mx.take(logits, ids, axis=-1), self._columns[likeliest])
