"""The rule for the drafts of a batch: one draft length for all requests.

The target's forward has the same number of tokens for each request, so shorter drafts
save nothing. Costs are kept by the number of requests, rounded up to a power of two, or
by the padded number of rows. Requests with their own draft length keep it.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from operator import attrgetter
from typing import Any, Protocol

from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Feedback, Plan
from mlx_speculation.engine.draft_length.costs import Source
from mlx_speculation.engine.draft_length.rule import Credit, DraftRule, Offers
from mlx_speculation.engine.draft_length.ruled import RuleDraftLength

Plans = dict[int, Plan]  # by the id of the planner


class BatchMember(Protocol):
    """A request of a batch."""

    planner: Any  # plans its drafts; set by `BatchDraftLength.take`

    @property
    def policy(self) -> DraftLengthPolicy:
        """The policy that it would have in a stream of its own."""
        ...


Rows = SequenceOf[BatchMember]


def row_bucket(rows: int) -> int:
    """Return the number of requests rounded up to a power of two."""
    return 1 << (rows - 1).bit_length()


class BatchDraftLength:
    """Decides the draft length of every round of a batch."""

    def __init__(
        self,
        sources: Callable[[int], SequenceOf[Source]],  # for a number of requests
        together: Credit,  # of batches of all sizes
        alone: Credit,  # of a batch of one request
        longest: int,
    ) -> None:
        self._sources, self._together, self._alone = sources, together, alone
        # The planner of all requests with adaptive draft lengths
        self.rule = DraftRule(sources(1), together, longest)
        self.bucket = 0  # the key of the costs of this round
        self.plans: Plans = {}  # of this round
        self._next: Plans = {}

    def take(self, rows: Rows) -> None:
        """Plan for these requests from now on, and drop the plans."""
        self.plans, self._next = {}, {}
        for row in rows:
            ruled = isinstance(row.policy, RuleDraftLength)
            row.planner = self.rule if ruled else row.policy

    def limits(
        self,
        rows: Rows,  # all requests
        context: int,  # how many tokens the longest request has in the target's caches
        room: list[int],  # the largest number of tokens that each request may draft
        # The number of rows in the target's forward, if it is padded; None: it is not
        size: int | None = None,
    ) -> list[int]:
        """Return how many tokens each request may draft in the next round."""
        bucket = row_bucket(len(rows)) if size is None else size
        if bucket != self.bucket:
            self.bucket, self.plans = bucket, {}
            self.rule.credit = self._alone if bucket == 1 else self._together
            self.rule.sources = self._sources(bucket)
        self._fill(self.plans, rows, context, room)
        result = []
        for row, limit in zip(rows, room, strict=True):
            most = min(limit, row.policy.longest, self.plans[id(row.planner)].length)
            result.append(max(0, most))
        return result

    def early(self, rows: Rows, context: int, room: list[int]) -> bool:
        """Plan the round after a plain step; return whether it drafts."""
        self._fill(self._next, rows, context, room)
        # Faster than a generator, which costs a call for each plan
        return any(map(attrgetter("length"), self._next.values()))

    def _fill(self, plans: Plans, rows: Rows, context: int, room: list[int]) -> None:
        """Make a plan with each planner that has no plan yet."""
        ruled: list[tuple[RuleDraftLength, int]] = []
        for row, limit in zip(rows, room, strict=True):
            if isinstance(row.policy, RuleDraftLength):
                ruled.append((row.policy, max(0, min(limit, row.policy.longest))))
            elif id(row.planner) not in plans:
                plans[id(row.planner)] = row.planner.plan(context, limit)
        if ruled and id(self.rule) not in plans:
            offers = [
                [each[:limit] for each in policy.survivals()]
                for policy, limit in ruled
                if not self.rule.late
            ]
            most = max(limit for _, limit in ruled)
            plans[id(self.rule)] = self.rule.choose(context, most, offers or None)

    def choose(self, context: int, limit: int, offers: Offers, *, behind: bool) -> Plan:
        """Return the plan for all requests with adaptive draft lengths."""
        plan = self.rule.choose(context, limit, offers, behind=behind)
        self.plans[id(self.rule)] = plan
        return plan

    def expects(self, rows: Rows, context: int) -> bool:
        """Return whether costly sources would draft if no plain step were in flight."""
        ruled = [p for row in rows if isinstance(p := row.policy, RuleDraftLength)]
        return self.rule.expects(context, [policy.survivals() for policy in ruled])

    def note(
        self,
        rows: Rows,
        context: int,
        drafted: list[int],
        accepted: list[int],
        feedback: Feedback,
    ) -> None:
        """Learn from a round, given each request's drafted and accepted tokens."""
        plans, self.plans, self._next = self.plans, self._next, {}
        common = plans.pop(id(self.rule), None)
        for row, count, right in zip(rows, drafted, accepted, strict=True):
            planner = row.planner
            if id(planner) in plans:
                counted = replace(feedback, drafted=count, accepted=right)
                planner.note(context, plans.pop(id(planner)), counted)
            elif planner is self.rule and count and common and common.source:
                planner.sources[common.source.index].rates.note(range(count), right)
        if common is not None:
            mean = replace(feedback, accepted=sum(accepted) / len(rows))
            # Tokens that a constraint has forced are in `feedback` alone
            followed = common if any(drafted) else Plan(0, "plain")
            self.rule.learn(context, followed, mean)
