"""The rule for the drafts of one stream, and of a batch, and the drafter of a stream.

A stream with a single costly source is planned by its forecast. With a free source, or
several sources, `plan` leaves room for the longest draft, and `propose` calls `choose`
after the free sources have proposed.

In a batch, requests with adaptive draft lengths share one plan, since the target's
forward pads all drafts to one length. The other requests keep their own lengths.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from operator import attrgetter
from typing import Any, Protocol

from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Feedback, Plan
from mlx_speculation.engine.draft_length.costs import Source
from mlx_speculation.engine.draft_length.rule import Credit, DraftRule, Offers, Survival
from mlx_speculation.engine.drafters.base import NOTHING, Choose, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.cascade import CascadeDrafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane

Plans = dict[int, Plan]  # by the id of the planner
Rows = SequenceOf["BatchMember"]


class RuleDraftLength(DraftRule):
    """The policy that follows the rule in one stream."""

    drafter: "RuledDrafter | None" = None  # if the rule is `late`
    # Returns each source's own forecast, see `OpenDrafter`
    forecast: Callable[[int], SequenceOf[Survival | None]] | None = None
    _chosen: Plan | None = None  # the plan that `choose` made for this round

    def survivals(self) -> list[Survival]:
        """Return each source's survival, as forecast or by its rates; () if free."""
        longest = self.longest + 1  # the first token may guess that of a step in flight
        unknown = [None] * len(self.sources)
        forecasts = self.forecast(longest) if self.forecast else unknown
        result: list[Survival] = []
        for source, survival in zip(self.sources, forecasts, strict=True):
            if survival is None:
                survival = source.rates.survival(range(longest))
            result.append(() if source.free else survival)
        return result

    def plan(self, context: int, limit: int) -> Plan:
        """Return the next round's plan; see `DraftLengthPolicy`."""
        offers = None if self.late else [self.survivals()]
        return super().choose(context, limit, offers)

    def choose(
        self, context: int, limit: int, offers: Offers | None, *, behind: bool = False
    ) -> Plan:
        """Return the round's plan, and keep it for `note`; see `DraftRule`."""
        self._chosen = super().choose(context, limit, offers, behind=behind)
        return self._chosen

    def note(self, context: int, plan: Plan, feedback: Feedback) -> Plan:
        """Learn from a round, and return its plan; see `DraftLengthPolicy`."""
        if plan.reason == "free" and self._chosen is not None:
            plan = self._chosen
        self._chosen = None
        self.learn(context, plan, feedback)
        if feedback.drafted and plan.source is not None:
            rates = self.sources[plan.source.index].rates
            rates.note(range(feedback.drafted), feedback.accepted)
        return plan


class RuledDrafter(CascadeDrafter):
    """Drafters, in the order of the sources, of which the rule picks one in each round.

    A batch decides for all its requests: it calls `offer` of each request's object, and
    sets `chosen` to a plan before it calls `propose`.
    """

    def __init__(
        self, drafters: SequenceOf[OpenDrafter], lengths: RuleDraftLength, target: Lane
    ) -> None:
        super().__init__(*drafters)
        self._lengths, self._target = lengths, target
        self._proposals: dict[int, Proposal] = {}
        self.chosen: Plan | None = None
        lengths.drafter = self

    @property
    def shared(self) -> OpenDrafter:
        """Its costly drafter, if it has exactly one; else itself."""
        costly = [each for each in self._drafters if not each.free]
        return costly[0] if len(costly) == 1 else self

    @property
    def lookups(self) -> CascadeDrafter:
        """A cascade of its free drafters."""
        return CascadeDrafter(*(each for each in self._drafters if each.free))

    def offer(
        self, sequence: Sequence, limit: int, choose: Choose, *, costly: bool = True
    ) -> list[Survival]:
        """Let free sources propose; return survivals, costly ones only if `costly`."""
        nothing: list[Survival] = [()] * len(self._drafters)
        offered = self._lengths.survivals() if costly else nothing
        self._proposals = {}
        for index, drafter in enumerate(self._drafters):
            if drafter.free:
                result = drafter.propose(sequence, limit, choose)
                self._proposals[index], offered[index] = result, result.survival or ()
        return offered

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Return the proposal that the rule picks, cut to the length that it picks."""
        self._proposing = OpenDrafter()
        seen = self._target.seen
        # If a plain step is in flight, the first proposed token guesses its token
        behind = seen >= len(sequence.tokens)
        if self.chosen is None:
            offers, room = [self.offer(sequence, limit, choose)], limit - behind
            self.chosen = self._lengths.choose(seen, room, offers, behind=behind)
        plan, self.chosen = self.chosen, None
        index = plan.source.index if plan.source is not None else 0
        for other in self._proposals:
            if other != index or not plan.length:
                self._drafters[other].discard()
        result, length = self._proposals.get(index, NOTHING), plan.length + behind
        if not plan.length:
            return result.until(0)
        self._proposing = self._drafters[index]
        if self._proposing.free:
            return result.until(length)
        return self._proposing.propose(sequence, length, choose)


class BatchMember(Protocol):
    """A request of a batch."""

    planner: Any  # plans its drafts; set by `BatchDraftLength.take`

    @property
    def policy(self) -> DraftLengthPolicy:
        """The policy that it would have in a stream of its own."""
        ...


def row_bucket(rows: int) -> int:
    """Return the number of requests rounded up to a power of two."""
    return 1 << (rows - 1).bit_length()


class BatchDraftLength:
    """Decides the draft length of every round of a batch."""

    def __init__(
        self,
        sources: Callable[[int], SequenceOf[Source]],  # for a number of requests
        credit: Credit,  # of several requests; a single one uses its policy's
        longest: int,
    ) -> None:
        self._sources, self._credit = sources, credit
        self.rule = DraftRule(sources(1), credit, longest)  # plans adaptive lengths
        self.bucket = 0  # number of rows, rounded up; the key of the costs
        self.plans: Plans = {}  # of this round
        self._next: Plans = {}

    def take(self, rows: Rows) -> None:
        """Plan for these requests from now on, and drop earlier plans."""
        self.plans, self._next = {}, {}
        for row in rows:
            row.planner = policy = row.policy
            if isinstance(policy, RuleDraftLength):
                row.planner = self.rule
                self.rule.credit = policy.credit if len(rows) == 1 else self._credit

    def limits(
        self, rows: Rows, context: int, room: list[int], size: int | None = None
    ) -> list[int]:
        """Return how many tokens each request may draft, at most its entry of `room`.

        `context` is the longest request's. `size` is the number of rows of the forward,
        padding included; None: that of the requests, rounded up.
        """
        bucket = row_bucket(len(rows)) if size is None else size
        if bucket != self.bucket:
            self.bucket, self.plans = bucket, {}
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
            # Tokens that a constraint has forced count in `feedback`, not in `drafted`
            followed = common if any(drafted) else Plan(0, "plain")
            self.rule.learn(context, followed, mean)
