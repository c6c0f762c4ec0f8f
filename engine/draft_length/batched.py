"""The rule for the drafts of a batch: one width for all requests.

All requests are fed the same number of tokens, so that a round costs by its widest
draft, and a short draft beside a long one saves nothing. The rule takes the source and
the width with the most expected tokens of all of them for their time, down to 0: plain
decoding. Numbers of requests between powers of two share their costs; where the target
is shown few numbers of them, those of one size do. What drafts have lost counts for all
numbers but 1: a request by itself is a stream. Requests that name a length of their own
keep to it.
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
    """A request of a batch, as far as its draft length goes.

    Attributes:
        planned: its own plan of the next round; None: the batch decides.
        next_plan: the same for the round after that, which is asked for early.
    """

    planned: Plan | None
    next_plan: Plan | None

    @property
    def policy(self) -> DraftLengthPolicy:
        """The policy that it would have alone."""
        ...


def row_bucket(rows: int) -> int:
    """Return the largest number of requests that costs like so many: 1, 2, 4, ..."""
    return 1 << (rows - 1).bit_length()


class BatchDraftLength:
    """Decides the width of every round.

    Args:
        rule: its sources are those of every request.
        costs: returns those of each source in rounds of so many requests.
        alone: the credit that one request by itself drafts on, as a stream does; None:
            that of `rule`.

    Attributes:
        plan: of the round, for all requests without a length of their own.
        bucket: the number of requests that the costs of the last round are kept under.
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
        rows: SequenceOf[BatchMember],  # all of them
        context: int,  # how many tokens the longest holds
        room: list[int],  # how many tokens each one's budget leaves room for
        # How many requests the target is shown; None: as many as there are
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
        """Plan the round after a plain one already; return whether it drafts."""
        if self._next is None:
            self._next = self._planned(rows, context, room)
        _plan_alone(rows, context, room, "next_plan")
        if self._next is not None and self._next.length > 0:
            return True
        for row in rows:  # no generator: each of its values is a call
            if row.next_plan is not None and row.next_plan.length > 0:
                return True
        return False

    def _planned(
        self, rows: SequenceOf[BatchMember], context: int, room: list[int]
    ) -> Plan | None:
        """Return the plan by forecasts, or the most; None: all keep to their own."""
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
        """Return the source that drafts for all, and the width.

        Args:
            context: how many tokens the longest request holds.
            limit: the most tokens that one may draft.
            offered: by the requests that leave their lengths open.
            behind: whether a plain step is in flight.
        """
        self._context = context
        self.plan = self._rule.choose(context, limit, offered, behind=behind)
        return self.plan.pick

    def expects(self, rows: SequenceOf[BatchMember]) -> bool:
        """Return whether costly sources are expected to draft without a step ahead."""
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
        """Learn from a round of these, given what each one's source drafted.

        A round in which nothing was drafted counts as plain, also where others had
        tokens that a constraint forced, which are no draft of a source.
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
        """Forget plans that were made for other requests."""
        self.plan = self._next = None

    def end(self) -> None:
        """Pay for prompts that were read in vain."""
        self._rule.end()


def _plan_alone(
    rows: SequenceOf[BatchMember], context: int, room: list[int], name: str
) -> None:
    """Let policies that do not follow the rule plan; one of several requests once."""
    plans: dict[int, Plan] = {}
    for row, limit in zip(rows, room, strict=True):
        policy = row.policy
        if isinstance(policy, RuleDraftLength) or getattr(row, name) is not None:
            continue
        if id(policy) not in plans:
            plans[id(policy)] = policy.plan(context, limit)
        setattr(row, name, plans[id(policy)])
