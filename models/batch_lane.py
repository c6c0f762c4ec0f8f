"""A model and the caches of several sequences, which it is fed together.

    lane.join([one, two])          the caches of lanes that were fed alone, put together
    with lane.begin() as round:    one forward over a rectangle of tokens
        logits = round.forward(tokens)         # [rows, n] -> [rows, n, vocab]
        round.commit([3, 1])       row 0 keeps 3 of them, row 1 keeps 1
    lane.leave([1])                only row 1 stays

The caches are mlx-lm's own batch caches: shorter rows have padding on their left, and
a row of a ring or a recurrent state is as that of its sequence alone. It knows no text,
no sampler, and not which row is whose.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.caches import Speculation, array_bytes, merged
from mlx_speculation.models.key_steps import takes_key_steps
from mlx_speculation.models.lane import Lane


class BatchLane:
    """One model with the caches of a batch.

    Args:
        model: an mlx-lm model that `models.batching` lets rows share.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.caches: list[Any] = []
        self.rows = 0
        self.key_steps = takes_key_steps(model)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, as allocated."""
        return array_bytes(self.caches)

    def join(self, lanes: Sequence[Lane]) -> None:
        """Let rows join behind those that are there.

        The lanes are left without caches: what they held is copied. If it fails, the
        batch and the lanes are as before.
        """
        joining = merged([lane.caches for lane in lanes], in_steps=self.key_steps)
        if self.rows:
            for own, other in zip(self.caches, joining, strict=True):
                own.extend(other)
        else:
            self.caches = joining
        self.rows += len(lanes)
        for lane in lanes:
            lane.caches = []

    def leave(self, stay: Sequence[int]) -> None:
        """Keep these rows, in this order, and let go of the others."""
        if not stay:
            self.caches = []
        elif len(stay) < self.rows:
            for cache in self.caches:
                cache.filter(mx.array(list(stay)))
        self.rows = len(stay)

    def extract(self, row: int) -> list[Any]:
        """Return caches that hold what one row does, of mlx-lm's kinds for one."""
        return [cache.extract(row) for cache in self.caches]

    def begin(self, *, whole: bool = False) -> "BatchRound":
        """Open a round of which a prefix of each row, or with `whole` all, is kept."""
        return BatchRound(self, whole=whole)


class BatchRound:
    """One speculation on a batch; leaving it without a commit rolls back.

    Attributes:
        committed: whether it was committed, and not rolled back.
    """

    def __init__(self, lane: BatchLane, *, whole: bool = False) -> None:
        self._lane = lane
        self._speculation = Speculation(lane.caches, whole=whole)
        self.committed = False

    def forward(self, tokens: mx.array) -> mx.array:
        """Feed tokens [rows, n]; return logits [rows, n, vocab], not evaluated."""
        logits: mx.array = self._lane.model(tokens, cache=self._speculation.caches)
        return logits

    def prepare(self, keep: int | list[int]) -> None:
        """Do what of `commit(keep)` can fail."""
        self._speculation.prepare(keep)

    def commit(self, keep: int | list[int]) -> None:
        """Keep the first `keep` tokens of all rows, or so many of each."""
        self._speculation.commit(keep)
        self.committed = True

    def rollback(self) -> None:
        """Undo it, also after a commit while nothing else has written."""
        self._speculation.rollback()
        self.committed = False

    def __enter__(self) -> "BatchRound":
        self._speculation.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._speculation.__exit__(*error)
