"""Masks of the ids that rows of logits may choose under a constraint.

A mask depends on the tokens before its row, and drafted tokens are on the device. They
are read while the device works on the row's logits; such a read is counted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_speculation.samplers import Constrained, Rows


class Masks:
    """The masks of one generation."""

    def __init__(self, text: Constrained) -> None:
        self.text = text
        self._reads = 0

    def take_reads(self) -> int:
        """Return how often the host has waited for tokens since this was asked."""
        reads, self._reads = self._reads, 0
        return reads

    def on(self, rows: Rows, ahead: Sequence[int]) -> Rows:
        """Return the rows with what each of them allows.

        Args:
            rows: what precedes each row.
            ahead: their tokens that follow the committed text, which were read.
        """
        self._reads += bool(ahead)
        return replace(rows, allowed=self.text.masks(ahead, rows.count))

    def on_draft(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Rows:
        """Return the rows of a drafter, which may have logits for some ids only.

        Where it has none for any allowed id, all are allowed: what it then proposes is
        not accepted, and has probabilities.

        Args:
            logits: [rows, vocab], or [rows, n] with `ids`; submitted before a read.
            rows: what precedes each row; what is ahead follows the committed text.
            ids: uint32 [n], the ids of the columns.
        """
        mx.async_eval(logits)
        ahead: Any = [] if rows.ahead is None else rows.ahead.tolist()
        rows = self.on(rows, ahead)
        assert rows.allowed is not None
        allowed = rows.allowed
        if ids is None:
            here = allowed[:, : logits.shape[-1]]
        else:  # ids that the target lacks are not allowed
            last = allowed.shape[-1] - 1
            here = allowed[:, mx.minimum(ids, last)] & (ids <= last)
        return replace(rows, allowed=allowed | ~here.any(axis=-1, keepdims=True))
