"""The drafts of many rows, chosen one token of each row at a time."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.drafters.base import NOTHING, Draft
from mlx_speculation.samplers import VerifyRequest, peaks, propose_batch


class BatchChain:
    """What is drafted for some rows in one round. Nothing of it is read.

    Args:
        rows: for whom.
        ids: the target's ids of the drafter's logits, uint32 [n]; None: all.

    Attributes:
        doubts: bool [rows], whether logits of a row could not be used.
    """

    def __init__(
        self, rows: Sequence[BatchRequest], ids: mx.array | None = None
    ) -> None:
        self._rows, self._ids = rows, ids
        self._columns: list[mx.array] = []
        self._laws: list[list[mx.array]] = [[] for _ in rows]
        # Alone, unusable logits are put away only where they could do harm.
        self._mends = not all(row.request.verifier.indifferent for row in rows)
        self.doubts = mx.zeros((len(rows),), mx.bool_)

    @property
    def tokens(self) -> mx.array:
        """What was chosen, uint32 [rows, k]."""
        return mx.stack(self._columns, axis=1)

    def choose(self, logits: mx.array) -> mx.array:
        """Choose the next token of every row, uint32 [rows], and let it be computed.

        Where a request's own processors raise, the row's `error` is set.

        Args:
            logits: [rows, vocab], or [rows, n] of the ids.
        """
        usable = mx.isfinite(peaks(logits))
        self.doubts = self.doubts | ~usable
        if self._mends:
            logits = mx.where(usable[:, None], logits, mx.array(0, logits.dtype))
        proposed = propose_batch(self._asked(), logits, self._ids)
        for place, error in proposed.failed.items():
            self._rows[place].error = error
        for place, probs in proposed.probs.items():
            self._laws[place].append(probs)
        self._columns.append(proposed.tokens)
        mx.async_eval(proposed.tokens)  # runs while the next step's graph is built
        return proposed.tokens

    def drafts(self, limits: Sequence[int], source: str) -> list[Draft]:
        """Return each row's draft, cut to its limit.

        Args:
            limits: how many tokens each row may draft; 0: none.
            source: the kind of drafter.
        """
        tokens, found = self.tokens, []
        for place, (row, limit) in enumerate(zip(self._rows, limits, strict=True)):
            laws = self._laws[place][:limit]
            probs = mx.concatenate(laws) if laws else None
            drafts = limit > 0 and row.error is None
            draft = Draft(tokens[place, :limit], probs, source) if drafts else NOTHING
            found.append(draft)
        return found

    def _asked(self) -> list[VerifyRequest]:
        """Return what each row asks of the next token, behind those drafted."""
        columns = self._columns
        placeholder = mx.zeros((len(columns),), mx.uint32) if columns else None
        matrix = None
        asked = []
        for place, row in enumerate(self._rows):
            ahead = placeholder
            if columns and row.request.verifier.shared is None:
                matrix = mx.stack(columns, axis=1) if matrix is None else matrix
                ahead = matrix[place]
            rows = row.request.sequence.rows(ahead)
            asked.append(VerifyRequest(row.request.verifier, rows))
        return asked
