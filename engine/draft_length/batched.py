"""The rule for the drafts of a batch: one draft length for all requests.

The target's forward has the same number of tokens for each request, so the longest
draft determines the cost of a round, and shorter ones save nothing. The rule picks the
source and the length with the most expected tokens of all requests for their time; 0 is
plain decoding. Costs are measured by number of requests, rounded up to a power of two,
or by the padded number of rows if the target has few of them. Batches of any size share
one credit, but a single request has that of streams. Requests with their own draft
length keep it.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Protocol

from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Feedback, Plan
from mlx_speculation.engine.draft_length.costs import RoundCosts
from mlx_speculation.engine.draft_length.rule import Credit, DraftRule, Offered
from mlx_speculation.engine.draft_length.ruled import RuleDraftLength


class BatchMember(Protocol):
    """The members of a batch's request that concern its draft length.

    Attributes:
        planned: its own plan for the next round; None: the batch decides.
        next_plan: its own plan for the round after that; None: the batch decides.
    """

    planned: Plan | None
    next_plan: Plan | None

    @property
    def policy(self) -> DraftLengthPolicy:
        """The policy that the request would have in a stream of its own."""
        ...


def row_bucket(rows: int) -> int:
    """Return the number of requests rounded up to a power of two."""
    return 1 << (rows - 1).bit_length()


class BatchDraftLength:
    """Decides the draft length of every round of a batch.

    Args:
        rule: the rule; each request has its sources.
        costs: returns the costs of each source for a number of requests.
        alone: the credit of a batch of one request; None: the credit of `rule`.

    Attributes:
        plan: the round's plan for requests without their own draft length.
        bucket: the number of requests under which the costs of this round are kept.
    """

    def __init__(
        self,
        rule: DraftRule,
        costs: Callable[[int], SequenceOf[RoundCosts]],
        alone: Credit | None = None,
    ) -> None:
        self._rule, self._costs = rule, costs
        self._alone, self._together = alone or rule.credit, rule.credit
        self.bucket = self._context = 0
        self.plan: Plan | None = None
        self._next: Plan | None = None

    def limits(
        self,
        rows: SequenceOf[BatchMember],  # all requests
        context: int,  # how many tokens the longest request has in the target's caches
        room: list[int],  # the most tokens that each request may draft
        # The number of rows in the target's forward, if it is padded; None: it is not
        size: int | None = None,
    ) -> list[int]:
        """Return how many tokens each request may draft in the next round."""
        bucket = row_bucket(len(rows)) if size is None else size
        if bucket != self.bucket:
            self.bucket, self.plan = bucket, None
            self._rule.credit = self._alone if bucket == 1 else self._together
            each = zip(self._rule.sources, self._costs(bucket), strict=True)
            for source, costs in each:
                source.costs = costs
        if self.plan is None:
            self.plan = self._planned(rows, context, room)
        _plan_alone(rows, context, room, "planned")
        result = []
        for row, limit in zip(rows, room, strict=True):
            plan = self.plan if row.planned is None else row.planned
            most = min(limit, row.policy.longest, 0 if plan is None else plan.length)
            result.append(max(0, most))
        return result

    def early(
        self, rows: SequenceOf[BatchMember], context: int, room: list[int]
    ) -> bool:
        """Plan the round after a plain step; return whether it drafts."""
        if self._next is None:
            self._next = self._planned(rows, context, room)
        _plan_alone(rows, context, room, "next_plan")
        if self._next is not None and self._next.length > 0:
            return True
        for row in rows:  # faster than any(...) with a generator
            if row.next_plan is not None and row.next_plan.length > 0:
                return True
        return False

    def _planned(
        self, rows: SequenceOf[BatchMember], context: int, room: list[int]
    ) -> Plan | None:
        """Return the plan of the rule; None: all requests have their own lengths."""
        result = [
            (row.policy, limit)
            for row, limit in zip(rows, room, strict=True)
            if isinstance(row.policy, RuleDraftLength)
        ]
        if not result:
            return None
        most = max(
            min(limit, member.longest, self._rule.longest) for member, limit in result
        )
        self._context = context
        return self._rule.plan(
            context,
            most,
            lambda: [
                [survival[: max(0, limit)] for survival in member.survivals()]
                for member, limit in result
            ],
        )

    def choose(
        self, context: int, limit: int, offered: Offered, *, behind: bool
    ) -> tuple[int, int]:
        """Return the index of the source that drafts for all, and the draft length.

        Args:
            context: how many tokens the longest request has in the target's caches.
            limit: the most tokens that a request may draft.
            offered: the survivals of requests without their own draft length.
            behind: whether a plain step is in flight.
        """
        self._context = context
        self.plan = self._rule.choose(context, limit, offered, behind=behind)
        return self.plan.pick

    def expects(self, rows: SequenceOf[BatchMember]) -> bool:
        """Return whether costly sources would draft if no plain step were in flight."""
        ruled = [p for row in rows if isinstance(p := row.policy, RuleDraftLength)]
        costly = [policy.survivals() for policy in ruled]
        return self._rule.expects(self._context, costly)

    def note(
        self,
        rows: SequenceOf[BatchMember],
        context: int,
        drafted: list[int],
        accepted: list[int],
        feedback: Feedback,
    ) -> None:
        """Learn from a round, given each request's drafted and accepted tokens.

        A round without drafts counts as plain, even if it had tokens that a constraint
        forced: they come from no source.
        """
        plan, noted = self.plan, set[int]()
        for row, count, right in zip(rows, drafted, accepted, strict=True):
            policy = row.policy
            if row.planned is None:
                if count and plan is not None and isinstance(policy, RuleDraftLength):
                    policy.rates[plan.source.index].note(count, right)
            elif id(policy) not in noted:
                counted = replace(feedback, drafted=count, accepted=right)
                policy.note(context, row.planned, counted)
                noted.add(id(policy))
            row.planned, row.next_plan = row.next_plan, None
        if plan is not None:
            mean = replace(feedback, accepted=sum(accepted) / len(rows))
            followed = plan if any(drafted) else Plan(0, "plain")
            self._rule.note(context, followed, mean)
        self.plan, self._next = self._next, None

    def rows_changed(self) -> None:
        """Drop the plans, which were made for other requests."""
        self.plan = self._next = None

    def end(self) -> None:
        """Charge the time of reading prompts; see `DraftRule.end`."""
        self._rule.end()


def _plan_alone(
    rows: SequenceOf[BatchMember], context: int, room: list[int], name: str
) -> None:
    """Let policies that do not follow the rule plan; each shared policy plans once."""
    plans: dict[int, Plan] = {}
    for row, limit in zip(rows, room, strict=True):
        policy = row.policy
        if isinstance(policy, RuleDraftLength) or getattr(row, name) is not None:
            continue
        if id(policy) not in plans:
            plans[id(policy)] = policy.plan(context, limit)
        setattr(row, name, plans[id(policy)])
