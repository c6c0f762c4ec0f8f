"""Rows of one shape, cut from dialogues in an order determined by a seed.

Each pass shuffles the dialogues, joins them to one text and cuts the text into rows
without padding. A slot is a position to draft from. Successive rows share tokens but no
slots: the first tokens of a row are drafted from the last slots of the row before.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlx_speculation.training.data.dialogues import Dialogue


class RowBatch(NamedTuple):
    """Rows of tokens."""

    tokens: NDArray[np.uint32]  # [rows, tokens]
    counts: NDArray[np.bool_]  # tokens to learn, [rows, tokens]
    slots: NDArray[np.int32] | None = None  # to draft from, [rows, n]; None: all


class RowBatches:
    """All batches of a training, by number."""

    def __init__(
        self,
        dialogues: Sequence[Dialogue],
        rows: int,  # of a batch
        slots: int,  # of a row; also the distance of the starts of successive rows
        more: int,  # tokens of a row after its slots
        seed: int,
        anchors: int | None = None,  # number of random slots of a row; None: all slots
        first: int = 0,  # token i + first is the first that slot i drafts
    ) -> None:
        self._dialogues, self._rows, self._slots = dialogues, rows, slots
        self._more, self._seed = more, seed
        self._anchors, self._first = anchors, first
        total = sum(len(each.tokens) for each in dialogues)
        # At least one batch; if the text is too short for it, its rows share slots too.
        self._count = max(rows, (total - more) // slots)
        self._joined: tuple[int, RowBatch] | None = None

    @property
    def per_pass(self) -> int:
        """Number of batches in a pass over the dialogues."""
        return self._count // self._rows

    def batch(self, number: int) -> RowBatch:
        """Return batch `number`, counted from 0."""
        epoch, place = divmod(number, self.per_pass)
        stream = self._stream(epoch)
        length = self._slots + self._more
        last = max(0, len(stream.tokens) - length)
        starts = (place * self._rows + np.arange(self._rows)) * self._slots
        index = np.minimum(starts, last)[:, None] + np.arange(length)
        index %= len(stream.tokens)
        counts = stream.counts[index]
        return RowBatch(stream.tokens[index], counts, self._chosen(number, counts))

    def _chosen(
        self, number: int, counts: NDArray[np.bool_]
    ) -> NDArray[np.int32] | None:
        """Return random slots, preferably ones whose first drafted token is learned."""
        if self._anchors is None:
            return None
        draw = np.random.default_rng([self._seed, number, 2]).random(
            (self._rows, self._slots)
        )
        draw += ~counts[:, self._first : self._first + self._slots]
        order = np.argsort(draw, axis=1)[:, : self._anchors]
        return np.sort(order, axis=1).astype(np.int32)

    def _stream(self, epoch: int) -> RowBatch:
        if self._joined is None or self._joined[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(
                len(self._dialogues)
            )
            result = [self._dialogues[number] for number in order]
            tokens = np.concatenate([each.tokens for each in result])
            counts = np.concatenate([each.counts for each in result])
            # A pass leaves out some tokens at its end; a random shift changes which.
            shift = int(np.random.default_rng([self._seed, epoch, 1]).integers(1 << 30))
            shift %= len(tokens)
            joined = RowBatch(np.roll(tokens, -shift), np.roll(counts, -shift))
            self._joined = epoch, joined
        return self._joined[1]
