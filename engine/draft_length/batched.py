"""The rule for the drafts of a batch: one draft length for all requests.

The target's forward has the same number of tokens for each request, so the longest
draft determines the cost of a round, and shorter ones save nothing. Costs are kept by
the number of requests, rounded up to a power of two; in a batch that pads its rows, by
the padded number of rows. Requests with their own draft length keep it.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from operator import attrgetter
from typing import Any, Protocol

from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Feedback, Plan
from mlx_speculation.engine.draft_length.cost_store import Source
from mlx_speculation.engine.draft_length.rule import Credit, DraftRule, Offered
from mlx_speculation.engine.draft_length.ruled import RuleDraftLength

_NO_PLAN = Plan(0, "plain")


class BatchMember(Protocol):
    """The attributes of a batch's request that concern its draft length."""

    planner: Any  # plans the request's drafts; set by `BatchDraftLength.take`

    @property
    def policy(self) -> DraftLengthPolicy:
        """The policy that the request would have in a stream of its own."""
        ...


def row_bucket(rows: int) -> int:
    """Return the number of requests rounded up to a power of two."""
    return 1 << (rows - 1).bit_length()


class BatchDraftLength:
    """Decides the draft length of every round of a batch.

    Attributes:
        rule: the rule; it plans for all requests with adaptive draft lengths.
        plans: the plans of this round, by the id of each request's planner.
        bucket: the number of requests under which the costs of this round are kept.
    """

    def __init__(
        self,
        sources: Callable[[int], SequenceOf[Source]],  # for a number of requests
        together: Credit,  # of batches of all sizes
        alone: Credit,  # of a batch of one request
        longest: int,
    ) -> None:
        self._sources, self._together, self._alone = sources, together, alone
        self.rule = DraftRule(sources(1), together, longest)
        self.bucket = self._context = 0
        self.plans: dict[int, Plan] = {}
        self._next: dict[int, Plan] = {}

    def take(self, rows: SequenceOf[BatchMember]) -> None:
        """Begin to plan for other requests, and drop the plans."""
        self.plans, self._next = {}, {}
        for row in rows:
            ruled = isinstance(row.policy, RuleDraftLength)
            row.planner = self.rule if ruled else row.policy

    def limits(
        self,
        rows: SequenceOf[BatchMember],  # all requests
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

    def early(
        self, rows: SequenceOf[BatchMember], context: int, room: list[int]
    ) -> bool:
        """Plan the round after a plain step; return whether it drafts."""
        self._fill(self._next, rows, context, room)
        # Faster than a generator, which costs a call for each plan
        return any(map(attrgetter("length"), self._next.values()))

    def _fill(
        self,
        plans: dict[int, Plan],
        rows: SequenceOf[BatchMember],
        context: int,
        room: list[int],
    ) -> None:
        """Make a plan with each planner that has no plan yet."""
        for row, limit in zip(rows, room, strict=True):
            planner = row.planner
            if id(planner) in plans:
                continue
            if planner is self.rule:
                plans[id(planner)] = self._planned(rows, context, room)
            else:
                plans[id(planner)] = planner.plan(context, limit)

    def _planned(
        self, rows: SequenceOf[BatchMember], context: int, room: list[int]
    ) -> Plan:
        """Return the rule's plan for all requests without a length of their own."""
        limits, offered = [], []
        for row, limit in zip(rows, room, strict=True):
            if isinstance(row.policy, RuleDraftLength):
                limits.append(max(0, min(limit, row.policy.longest)))
                if not self.rule.late:
                    survivals = row.policy.survivals()
                    offered.append([each[: limits[-1]] for each in survivals])
        self._context = context
        return self.rule.choose(context, max(limits), offered or None)

    def choose(
        self, context: int, limit: int, offered: Offered, *, behind: bool
    ) -> Plan:
        """Return the plan: the source that drafts for all requests, and its length.

        The arguments are those of `DraftRule.choose`, of the longest request, for the
        largest room, and of the requests without their own draft length.
        """
        plan = self.rule.choose(context, limit, offered, behind=behind)
        self.plans[id(self.rule)] = plan
        return plan

    def expects(self, rows: SequenceOf[BatchMember]) -> bool:
        """Return whether costly sources would draft if no plain step were in flight."""
        ruled = [p for row in rows if isinstance(p := row.policy, RuleDraftLength)]
        costly = [policy.survivals() for policy in ruled]
        return self.rule.expects(self._context, costly)

    def note(
        self,
        rows: SequenceOf[BatchMember],
        context: int,
        drafted: list[int],
        accepted: list[int],
        feedback: Feedback,
    ) -> None:
        """Learn from a round, given each request's drafted and accepted tokens.

        A round without drafts counts as plain, even if a constraint forced tokens in
        it: forced tokens come from no source.
        """
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
            self.rule.learn(context, common if any(drafted) else _NO_PLAN, mean)
