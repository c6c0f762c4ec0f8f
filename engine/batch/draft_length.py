"""How many tokens a round of a batch drafts: one width for all rows.

All rows are fed the same number of tokens, so that a round costs by its widest draft,
and a short draft beside a long one saves nothing. The width with the most tokens per
second is taken, by the measured costs of rounds of so many rows and by what was
accepted of each row's drafts:

    speed(k) = sum over rows of (1 + r0 + ... + r0 ... r(k-1)) / seconds(rows, k)

down to 0, which is plain decoding of the batch. Few lengths are looked at, since each
new one is dear on some devices, for each number of rows. Numbers of rows between powers
of two share their costs; where the target is shown few numbers of rows, those of one
size do.
Rows that name a length of their own keep to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from mlx_speculation.engine.batch.request import BatchRequest
from mlx_speculation.engine.draft_length.acceptance import AcceptanceRates
from mlx_speculation.engine.draft_length.adaptive import (
    AdaptiveDraftLength,
    few_lengths,
)
from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.draft_length.calibration import Calibration
from mlx_speculation.engine.draft_length.costs import RoundCosts
from mlx_speculation.engine.drafters.base import Proposal

# Both have the costs of rounds of so many rows.
BatchPolicy = AdaptiveDraftLength | Calibration
# Makes the policy of a batch, given the rates that all of its rows share.
MakeLengths = Callable[[AcceptanceRates], BatchPolicy]
# Returns what rounds of so many rows cost, given the same rates.
CostsOf = Callable[[int, AcceptanceRates], RoundCosts]


def row_bucket(rows: int) -> int:
    """Return the largest number of rows that costs like so many: 1, 2, 4, 8, ..."""
    return 1 << (rows - 1).bit_length()


class RowRates(AcceptanceRates):
    """What is accepted of the rows' drafts; expects the mean over the rows.

    As rates of its own it has those of all rows together, which new rows begin with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: Sequence[BatchRequest] = ()

    def note(self, drafted: int, accepted: float) -> None:
        """Do nothing: every row is noted by itself."""

    def note_row(self, row: BatchRequest, drafted: int, accepted: int) -> None:
        """Count what was accepted of one row's draft."""
        row.rates.note(drafted, accepted)
        super().note(drafted, accepted)

    def for_row(self) -> AcceptanceRates:
        """Return the rates that a new row begins with."""
        return self.loosened()

    def expected(self, longest: int) -> list[float]:
        """Return what a draft of each length is expected to bring, mean over rows."""
        if not self.rows:
            return super().expected(longest)
        each = [row.rates.expected(longest) for row in self.rows]
        return [sum(values) / len(each) for values in zip(*each, strict=True)]


class BatchDraftLength:
    """Decides the width of every round.

    The policy goes on when the number of rows changes: what it has tried and lost
    counts for all of them.

    Attributes:
        bucket: the number of rows that the costs of the last round are kept under.
    """

    def __init__(self, make: MakeLengths, costs: CostsOf) -> None:
        self._costs, self.rates = costs, RowRates()
        self._policy = make(self.rates)
        self.bucket = 0
        self._plan: Plan | None = None
        self._next: Plan | None = None

    def limits(
        self,
        rows: Sequence[BatchRequest],  # all rows
        context: int,  # how many tokens the longest row holds
        room: list[int],  # how many tokens each row's budget leaves room for
        # How many rows the target is shown; None: as many as there are
        size: int | None = None,
    ) -> list[int]:
        """Return how many tokens each row may draft in the next round."""
        shared = {
            index: min(limit, row.request.policy.longest)
            for index, (row, limit) in enumerate(zip(rows, room, strict=True))
            if _measured(row)
        }
        if shared:
            self.rates.rows = [rows[index] for index in shared]
        if shared and self._plan is None:
            bucket = row_bucket(len(rows)) if size is None else size
            if bucket != self.bucket:
                self._policy.costs = self._costs(bucket, self.rates)
                self._policy.decide_anew()
                self.bucket = bucket
            self._plan = self._policy.plan(context, max(shared.values()))
        found = []
        for index, (row, limit) in enumerate(zip(rows, room, strict=True)):
            plan, most = self._plan, shared.get(index, limit)
            if index not in shared:
                if row.planned is None:
                    row.planned = row.request.policy.plan(context, limit)
                plan = row.planned
            found.append(max(0, min(most, plan.length if plan is not None else 0)))
        return found

    def early(
        self, rows: Sequence[BatchRequest], context: int, room: list[int]
    ) -> bool:
        """Plan the round after a plain one already; return whether it drafts."""
        plans = []
        for row, limit in zip(rows, room, strict=True):
            if limit <= 0:
                continue
            if _measured(row):
                if self._next is None:
                    self._next = self._policy.plan(context, max(room))
                plans.append(self._next)
            else:
                if row.following is None:
                    row.following = row.request.policy.plan(context, limit)
                plans.append(row.following)
        return any(plan.length > 0 for plan in plans)

    def width(
        self,
        rows: Sequence[BatchRequest],
        context: int,
        found: Sequence[Proposal],
        ahead: int,
    ) -> int:
        """Return the width that pays best for drafts that were found already.

        Rows that name a length of their own are not cut. Of each draft so many tokens
        stand for those of a step that is not read.
        """
        drafts = [max(0, draft.length - ahead) for draft in found]
        fixed = [n for n, row in zip(drafts, rows, strict=True) if not _measured(row)]
        least, longest = max(fixed, default=0), max(drafts, default=0)
        costs, plan = self._policy.costs, self._plan
        if plan is None or plan.reason not in ("best", "plain"):
            return longest
        if least == longest or costs.plain(context) is None:
            return longest
        each = [
            row.rates.expected(longest)
            if draft.survival is None
            else _expected(draft.survival[ahead:], longest)
            for row, draft in zip(rows, found, strict=True)
        ]
        seconds = costs.curve(context, longest)

        def speed(width: int) -> float:
            pairs = zip(each, drafts, strict=True)
            tokens = sum(expected[min(n, width)] for expected, n in pairs)
            return tokens / seconds[width]

        between = [n for n in few_lengths(longest) if n > least]
        return max((least, *between, longest), key=speed)

    def note(
        self,
        rows: Sequence[BatchRequest],
        context: int,
        drafted: list[int],
        accepted: list[int],
        feedback: Feedback,
    ) -> None:
        """Learn from a round of these rows, given what each drafted and accepted."""
        for row, count, right in zip(rows, drafted, accepted, strict=True):
            if count:
                self.rates.note_row(row, count, right)
            if row.planned is not None:
                own = replace(feedback, drafted=count, accepted=right)
                row.request.policy.note(context, row.planned, own)
            row.planned, row.following = row.following, None
        if self._plan is not None:
            mean = replace(feedback, accepted=sum(accepted) / len(rows))
            self._policy.note(context, self._plan, mean)
        self._plan, self._next = self._next, None

    def join(self, row: BatchRequest) -> None:
        """Let a new row begin with what is known of the others."""
        row.rates = self.rates.for_row()
        self._policy.decide_anew()

    def leave(self) -> None:
        """Forget plans that were made for rows which are gone."""
        self._plan = self._next = None
        self._policy.decide_anew()

    def end(self) -> None:
        """Keep what was learnt."""
        self._policy.end()


def _expected(survival: Sequence[float], longest: int) -> list[float]:
    """Return the tokens that 0 to `longest` drafted ones are expected to bring."""
    padded = [*survival, *[0.0] * longest][:longest]
    return [*accumulate(padded, initial=1.0)]


def _measured(row: BatchRequest) -> bool:
    return getattr(row.request.policy, "by_batch", False)
