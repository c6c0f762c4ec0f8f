"""What drafts for the rows of a batch: each row's own drafter, or one model for all."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlx_speculation.engine.batch.prefill_budget import PrefillBudget
from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.drafters.base import NOTHING, Choices, Draft, ReadsAhead


class BatchDrafter(Protocol):
    """Drafts for many rows.

    `follow` comes before every round. The calls of one that drafts: `prepare`,
    `propose`, then `settle` and `done`, or `discard`.
    """

    @property
    def ahead(self) -> bool:
        """Whether it can draft behind a token that is not read yet."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds for all rows together."""
        ...

    def follow(self, rows: Sequence[BatchRequest]) -> None:
        """Take notice of the rows of the next round, in their order."""
        ...

    def prepare(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Read of the rows what no round should be measured with: prompts, mostly."""
        ...

    def propose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Draft]:
        """Return a draft of each row, of at most its limit; 0 and less: none.

        Where a request's own processors raise, the row's `error` is set.

        Args:
            rows: all rows of the batch, in their order.
            limits: how many tokens each may draft, those ahead not counted.
            ahead: how many tokens of a step are not known yet, 0 or 1: the drafts
                stand for them in their first place.
        """
        ...

    def rectangle(self, drafts: Sequence[Draft], width: int) -> mx.array:
        """Return the tokens of drafts, uint32 [rows, width]; behind short ones any.

        Args:
            drafts: what `propose` has returned, without what stands ahead.
            width: that of the longest.
        """
        ...

    def settle(self, accepted: Sequence[int | None]) -> None:
        """Keep so many tokens of each row's draft; None: the row has failed.

        Legal once the round was read. Must not raise for what a drafter does.
        """
        ...

    def discard(self) -> None:
        """Undo the last `propose` and `settle`. Never raises."""
        ...

    def done(self) -> None:
        """Let go of what could undo the round: the target has committed its own."""
        ...

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Let go of rows."""
        ...


class PerRequestDrafters:
    """Every row asks the drafter that it would have alone.

    Lookups cost next to nothing. A draft model that is asked like this runs one row at
    a time, which is right for what cannot be batched: cascades, chains that end early.
    """

    def __init__(self) -> None:
        self._rows: list[BatchRequest] = []  # those that were asked in this round
        self._asked: list[bool] = []
        self._begun: set[int] = set()
        self._reading = False

    @property
    def ahead(self) -> bool:
        """It can, but no step should be measured beside what is read."""
        return not self._reading

    @property
    def nbytes(self) -> int:
        """Nothing: what drafters hold is their rows'."""
        return 0

    def follow(self, rows: Sequence[BatchRequest]) -> None:
        """Do nothing."""

    def prepare(self, rows: Sequence[BatchRequest], limits: Sequence[int]) -> None:
        """Let drafters begin that are asked for the first time, once they have read.

        One chunk's worth of text is read at most.
        """
        self._reading = False
        room: PrefillBudget | None = None
        for row, limit in zip(rows, limits, strict=True):
            drafter, sequence = row.request.drafter, row.request.sequence
            if drafter is None or limit <= 0 or row.uid in self._begun:
                continue
            room = room or PrefillBudget(row.request.target.prefill_step)
            if isinstance(drafter, ReadsAhead):
                self._reading |= not drafter.read_ahead(sequence, room.fits)
            if self._reading:
                break
            drafter.begin(sequence)
            self._begun.add(row.uid)

    def propose(
        self, rows: Sequence[BatchRequest], limits: Sequence[int], ahead: int
    ) -> list[Draft]:
        """Ask each row's drafter; see `BatchDrafter`."""
        self._rows, self._asked = list(rows), [False] * len(rows)
        found = []
        for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            found.append(NOTHING)
            drafter = row.request.drafter
            if drafter is None or limit <= 0 or row.uid not in self._begun:
                continue
            choices = Choices(row.request.verifier)
            self._asked[index] = True
            try:
                draft = drafter.propose(row.request.sequence, ahead + limit, choices)
            except Exception as error:
                drafter.discard()
                self._asked[index] = False
                row.error = error
                continue
            except BaseException:
                self.discard()
                raise
            found[index] = draft
            if draft.length <= ahead:
                drafter.discard()
                self._asked[index] = False
                row.request.statistics.empty_drafts += draft is not NOTHING
                row.request.statistics.reads += draft.reads
        return found

    def rectangle(self, drafts: Sequence[Draft], width: int) -> mx.array:
        """Put them together."""
        return padded(drafts, width)

    def settle(self, accepted: Sequence[int | None]) -> None:
        """Let each drafter keep its own."""
        for row, asked, count in zip(self._rows, self._asked, accepted, strict=True):
            drafter = row.request.drafter
            if drafter is not None and asked:
                if count is None:
                    drafter.discard()
                else:
                    drafter.settle(count)
        self._asked = []
        self._rows = []

    def discard(self) -> None:
        """Let each drafter undo its round."""
        for row, asked in zip(self._rows, self._asked, strict=True):
            if asked and row.request.drafter is not None:
                row.request.drafter.discard()
        self._rows, self._asked = [], []

    def done(self) -> None:
        """Do nothing."""

    def leave(self, gone: Sequence[BatchRequest]) -> None:
        """Forget them."""
        self._begun -= {row.uid for row in gone}


def padded(drafts: Sequence[Draft], width: int) -> mx.array:
    """Return drafted tokens uint32 [rows, width], shorter ones padded with 0."""
    rows = [
        mx.pad(draft.tokens, (0, width - draft.length))
        if draft.length < width
        else draft.tokens[:width]
        for draft in drafts
    ]
    return mx.stack(rows)
