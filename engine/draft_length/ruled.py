"""The rule for the drafts of one stream.

A single costly source is planned by its forecast. With a free source, or several
sources, the rule decides after the free sources have proposed:

    plan        the longest draft that there is room for
    propose     a lookup's survival 0.9 0.3 ...; a model's forecast 0.8 0.7 ...
    choose      the source and the length that are worth most; 0: a plain step
    note        the rule learns from the round, whose plan is that of `choose`
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.draft_length.cost_store import Known
from mlx_speculation.engine.draft_length.rule import (
    Credit,
    DraftRule,
    Source,
    Survival,
)
from mlx_speculation.engine.drafters.base import (
    NOTHING,
    Choose,
    OpenDrafter,
    Proposal,
)
from mlx_speculation.engine.drafters.cascade import CascadeDrafter, proposed
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane

Forecasts = Callable[[int], SequenceOf[Survival | None]]


class RuleDraftLength:
    """The policy that follows the rule in one stream.

    Args:
        known: costs and acceptance of each source; the streams of a generator share
            them.
        credit: the credit of the sources, which these streams share too.
        longest: the longest draft.

    Attributes:
        forecast: returns each source's own forecast, see `OpenDrafter`.
        drafter: the drafter that calls `choose`, if the rule is `late`.
        sources: the sources of the rule.
        credit: as passed.
        rates: the acceptance rates of each source.
        late: see `DraftRule`.
    """

    def __init__(
        self,
        known: SequenceOf[Known],
        credit: Credit,
        longest: int,
    ) -> None:
        self.longest = longest
        self.forecast: Forecasts = lambda _: [None] * len(known)
        self.drafter: RuledDrafter | None = None
        self.rates = [one.rates.loosened() for one in known]
        self._known, self.credit = known, credit
        self.sources = [Source(one.costs, one.free, one.name) for one in known]
        self._rule = DraftRule(self.sources, credit, longest)
        self.late = self._rule.late
        self._chosen: Plan | None = None  # the plan that `choose` made for this round

    def plan(self, context: int, limit: int) -> Plan:
        """Return the next round's plan; see `DraftLengthPolicy`."""
        return self._rule.plan(context, limit, lambda: [self.survivals()])

    def survivals(self) -> list[Survival]:
        """Return the survival of each costly source, by its forecast or its rates."""
        longest = self.longest + 1  # one may stand for the token of a step in flight
        result: list[Survival] = []
        forecasts = zip(self.sources, self.forecast(longest), self.rates, strict=True)
        for source, forecast, rates in forecasts:
            survival = rates.survival(longest) if forecast is None else forecast
            result.append(() if source.free else survival)
        return result

    def choose(
        self, context: int, limit: int, survivals: SequenceOf[Survival], *, behind: bool
    ) -> tuple[int, int]:
        """Return the index of the source and the length; see `DraftRule.choose`.

        Args:
            context: how many tokens the target's caches hold.
            limit: the most tokens that may be drafted.
            survivals: the survival of each source's proposal or forecast.
            behind: whether a plain step is in flight.
        """
        self._chosen = self._rule.choose(context, limit, [survivals], behind=behind)
        return self._chosen.pick

    def note(self, context: int, plan: Plan, feedback: Feedback) -> Plan:
        """Learn from a round, and return its plan; see `DraftLengthPolicy`."""
        plan, self._chosen = self._chosen or plan, None
        self._rule.note(context, plan, feedback)
        if feedback.drafted and plan.source is not None:
            rates = self.rates[plan.source.index]
            rates.note(feedback.drafted, feedback.accepted)
        return plan

    def end(self) -> None:
        """Pass the rates on to later streams."""
        self._rule.end()
        for known, rates in zip(self._known, self.rates, strict=True):
            known.rates = rates


class RuledDrafter(CascadeDrafter):
    """Drafters of which the rule picks one in each round.

    A batch decides for all its requests: it calls `offer` of each, and sets `chosen` to
    source and length before it calls `propose`.

    Args:
        drafters: the drafters, in the order of the sources.
        lengths: picks a drafter and its draft length.
        target: the target's lane. While a plain step is in flight, it has seen the last
            known token, and the first proposed token stands for the step's.
    """

    def __init__(
        self, drafters: SequenceOf[OpenDrafter], lengths: RuleDraftLength, target: Lane
    ) -> None:
        super().__init__(*drafters)
        self._lengths, self._target = lengths, target
        self._proposals: dict[int, Proposal] = {}
        self.chosen: tuple[int, int] | None = None
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

    def costs(self, index: int) -> bool:
        """Return whether the source of this index is costly."""
        return not self._drafters[index].free

    def offer(
        self, sequence: Sequence, limit: int, choose: Choose, *, costly: bool = True
    ) -> list[Survival]:
        """Let the free sources propose; return the survival of each source.

        It is empty for costly sources if `costly` is not set.
        """
        offered: list[Survival] = [()] * len(self._drafters)
        if costly:
            offered = self._lengths.survivals()
        self._proposals = {}
        for index, drafter in enumerate(self._drafters):
            if drafter.free:
                result = proposed(drafter, sequence, limit, choose)
                self._proposals[index], offered[index] = result, result.survival or ()
        return offered

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Return the proposal that the rule picks, cut to the length that it picks."""
        self._proposing = None
        behind = self._target.seen >= len(sequence.tokens)
        if self.chosen is None:
            offered = self.offer(sequence, limit, choose)
            self.chosen = self._lengths.choose(
                self._target.seen, limit - behind, offered, behind=behind
            )
        (index, length), self.chosen = self.chosen, None
        for other in self._proposals:
            if other != index or not length:
                self._drafters[other].discard()
        result = self._proposals.get(index, NOTHING)
        if not length:
            return result.until(0)
        self._proposing = self._drafters[index]
        if self._proposing.free:
            return result.until(length + behind)
        return proposed(self._proposing, sequence, length + behind, choose)
