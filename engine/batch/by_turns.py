"""The lookups of each row, and a model or a head that drafts for all of them."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_speculation.engine.batch.base import BatchDrafter
from mlx_speculation.engine.batch.per_request import PerRequestDrafter
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.draft_length.batched import BatchDraftLength
from mlx_speculation.engine.drafters.base import OpenDrafter, Proposal


class BatchCascadeDrafter(PerRequestDrafter):
    """Drafts with the source that the rule picks for all rows.

    What is shared cannot draft behind a step in flight. Where it is expected to pay, no
    step is submitted ahead, so that the next round can ask it.

    Args:
        lengths: picks the source and the width.
        shared: drafts for all rows.
    """

    shares = True

    def __init__(self, lengths: BatchDraftLength, shared: BatchDrafter) -> None:
        super().__init__(lengths)
        self._shared, self._drafts, self._waits = shared, False, False

    @property
    def ahead(self) -> bool:
        """Whether lookups alone are expected to pay."""
        return super().ahead and not self._waits

    @property
    def nbytes(self) -> int:
        """Bytes of what is shared."""
        return self._shared.nbytes

    def met_new_shapes(self) -> bool:
        """Return whether what is shared has met new shapes."""
        return self._shared.met_new_shapes()

    def follow(self, rows: Sequence[BatchRequest]) -> None:
        """Let what is shared take notice of the rows."""
        self._shared.follow(rows)

    def prepare(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Let lookups index prompts, and what is shared read them."""
        super().prepare(rows, limits)
        self._shared.prepare(
            rows, [n * _shares(r) for r, n in zip(rows, limits, strict=True)]
        )

    def _own(self, row: BatchRequest) -> OpenDrafter | None:
        if row.ruled is not None:
            return row.ruled.lookups
        return None if _shares(row) else row.request.drafter

    def propose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Proposal]:
        """Ask the source that is picked; see `BatchDrafter`.

        Rows with a length of their own draft with what is shared, if lookups do not.
        """
        self._drafts = self._waits = False
        index, width = self._choose(rows, limits, ahead)
        most = []
        for row, limit in zip(rows, limits, strict=True):
            costs = row.ruled is None or row.ruled.costs(index)
            own = limit if row.ruled is None else min(limit, width)
            most.append(own if costs and _shares(row) else 0)
        if ahead or not any(n > 0 for n in most):
            fixed = any(n > 0 for n in most)
            self._waits = (
                bool(ahead) and not width and (fixed or self._lengths.expects(rows))
            )
            return self._asked_alone(rows, limits, ahead)
        for row in rows:
            if row.ruled is not None:
                row.ruled.chosen = None
        self._drafts = True
        return self._shared.propose(rows, self._shared.within(rows, most), ahead)

    def rectangle(self, drafts: Sequence[Proposal], width: int) -> mx.array:
        """Put them together as who has drafted does."""
        if self._drafts:
            return self._shared.rectangle(drafts, width)
        return super().rectangle(drafts, width)

    def settle(self, accepted: Sequence[int | None]) -> None:
        """Let who has drafted keep its own."""
        if self._drafts:
            self._shared.settle(accepted)
        else:
            super().settle(accepted)

    def discard(self) -> None:
        """Let all undo their round."""
        super().discard()
        self._shared.discard()

    def done(self) -> None:
        """Let what is shared let go of the round."""
        self._shared.done()

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let all forget them."""
        super().leave(gone)
        self._shared.leave(gone)


def _shares(row: BatchRequest) -> bool:
    """Return whether what all rows share can draft for a row."""
    return row.drafter.batch_lane is not None or row.drafter.batch_head is not None
