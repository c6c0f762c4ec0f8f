"""Masks of the token ids that a constraint allows in rows of logits.

A mask depends on the tokens before its row. Drafted tokens are on the device, so the
host has to read them, which it does while the device computes the row's logits.
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
        """Return how often the host has waited for tokens since the last call."""
        reads, self._reads = self._reads, 0
        return reads

    def on(self, rows: Rows, ahead: Sequence[int]) -> Rows:
        """Return `rows` with masks; `ahead` are the tokens after the committed text."""
        self._reads += bool(ahead)
        return replace(rows, allowed=self.text.masks(ahead, rows.count))

    def on_draft(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Rows:
        """Return the rows of a drafter with their masks.

        A drafter can have logits for some ids only. If it has logits for none of a
        row's allowed ids, the row allows all ids: the row's probabilities stay valid,
        and the target rejects the drafted token.

        `logits` are [rows, vocab]; or [rows, n] with `ids`, uint32 [n], the token ids
        of the columns.
        """
        mx.async_eval(logits)  # before the host waits for drafted tokens
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
