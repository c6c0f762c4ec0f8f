"""The rows of a batch, each with the drafter that it would have alone."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_speculation.engine.batch.base import BatchDrafter, rectangle
from mlx_speculation.engine.batch.prefill_budget import PrefillBudget
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.draft_length.batched import BatchDraftLength
from mlx_speculation.engine.drafters.base import NOTHING, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose


class PerRequestDrafter(BatchDrafter):
    """Every row asks the drafter that it would have alone.

    Lookups cost next to nothing. A draft model that is asked like this runs one row at
    a time, which is right for what cannot be batched: cascades, reduced vocabularies.

    Args:
        lengths: chooses the source and the width, once all rows' lookups have proposed.
    """

    shares = False  # whether costly sources draft for all rows, and not behind a step

    def __init__(self, lengths: BatchDraftLength) -> None:
        self._lengths = lengths
        # Of each row in this round, whose proposal is pending
        self._asked: list[OpenDrafter | None] = []
        self._begun: set[int] = set()
        self._reading = False

    @property
    def ahead(self) -> bool:
        """It can, but no step should be measured beside what is read."""
        return not self._reading

    def prepare(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Let drafters begin that are asked for the first time, once they have read.

        One chunk's worth of text is read at most.
        """
        self._reading = False
        room: PrefillBudget | None = None
        for row, limit in zip(rows, limits, strict=True):
            drafter, sequence = self._own(row), row.request.sequence
            if drafter is None or limit <= 0 or row.uid in self._begun:
                continue
            room = room or PrefillBudget(row.request.target.prefill_step)
            self._reading |= not drafter.read_ahead(sequence, room.fits)
            if self._reading:
                break
            drafter.begin(sequence)
            self._begun.add(row.uid)

    def _own(self, row: BatchRequest) -> OpenDrafter | None:
        """Return what reads the prompt of a row for itself."""
        return row.request.drafter

    def propose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Proposal]:
        """Ask each row's drafter; see `BatchDrafter`."""
        self._choose(rows, limits, ahead)
        return self._asked_alone(rows, limits, ahead)

    def _asked_alone(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Proposal]:
        self._asked = [None] * len(rows)
        found = []
        for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            found.append(NOTHING)
            drafter = None if self._own(row) is None else row.request.drafter
            if drafter is None or limit <= 0 or row.uid not in self._begun:
                continue
            choices = CheckedChoose(row.request.verifier)
            self._asked[index] = drafter
            try:
                draft = drafter.propose(row.request.sequence, ahead + limit, choices)
            except Exception as error:
                drafter.discard()
                self._asked[index] = None
                row.error = error
                continue
            except BaseException:
                self.discard()
                raise
            found[index] = draft
            if draft.length <= ahead:
                drafter.discard()
                self._asked[index] = None
                row.request.statistics.empty_drafts += draft is not NOTHING
                row.request.statistics.reads += draft.reads
        return found

    def _choose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> tuple[int, int]:
        """Let the rule choose for the rows that offer it several sources, or free ones.

        The others were planned before.

        Returns:
            The source and the width.
        """
        asked = [
            (row, drafter, limit)
            for row, limit in zip(rows, limits, strict=True)
            if (drafter := row.ruled) and limit > 0 and row.uid in self._begun
        ]
        if not asked:
            return 0, 0
        offered = [
            drafter.offer(
                row.request.sequence,
                ahead + limit,
                CheckedChoose(row.request.verifier),
                costly=not ahead or not self.shares,
            )
            for row, drafter, limit in asked
        ]
        context = max(len(row.tokens) for row in rows)
        most = max(limit for _, _, limit in asked)
        chosen = self._lengths.choose(context, most, offered, behind=ahead > 0)
        for _, drafter, limit in asked:
            drafter.chosen = chosen[0], min(limit, chosen[1])
        return chosen

    def rectangle(self, drafts: Sequence[Proposal], width: int) -> mx.array:
        """Put them together."""
        return rectangle(drafts, width)

    def settle(self, accepted: Sequence[int | None]) -> None:
        """Let each drafter keep its own."""
        for drafter, count in zip(self._asked, accepted, strict=True):
            if drafter is None:
                continue
            if count is None:
                drafter.discard()
            else:
                drafter.settle(count)
        self._asked = []

    def discard(self) -> None:
        """Let each drafter undo its round."""
        for drafter in self._asked:
            if drafter is not None:
                drafter.discard()
        self._asked = []

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Forget them."""
        self._begun -= {row.uid for row in gone}
