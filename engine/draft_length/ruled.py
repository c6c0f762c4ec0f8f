"""The rule for streams with a free source, or with several sources.

Which of them drafts is decided when the free proposals are there:

    plan        at most so many tokens, as far as there is room
    propose     a lookup: survival 0.9 0.3 ...; a model, by its forecast: 0.8 0.7 ...
    choose      the source and the length that are worth most; 0: a plain step
    note        the rule learns from the round, as the plan that it has made
"""

from collections.abc import Sequence as SequenceOf

from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.draft_length.cost_store import Known
from mlx_speculation.engine.draft_length.rule import Credit, DraftRule, Offer, Source
from mlx_speculation.engine.drafters.base import (
    NOTHING,
    Choose,
    OpenDrafter,
    Proposal,
)
from mlx_speculation.engine.drafters.cascade import CascadeDrafter, proposed
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane


class RuleDraftLength:
    """Plans the most, and chooses among proposals and forecasts.

    Args:
        known: of each source, the costs of rounds and the acceptance; shared by the
            streams of a generator.
        free: whether each one proposes at no cost.
        credit: shared likewise.
        longest: no draft is longer.

    Attributes:
        free: as passed.
        planned: whether it plans the rounds of its stream; those of a batch it does
            not.
    """

    by_batch = True

    def __init__(
        self,
        known: SequenceOf[Known],
        free: SequenceOf[bool],
        credit: Credit,
        longest: int,
    ) -> None:
        self.free, self.longest, self.planned = free, longest, False
        self._known = known
        self._rates = [one.rates.loosened() for one in known]
        self._sources = [
            Source(one.costs, free=own) for one, own in zip(known, free, strict=True)
        ]
        self._rule = DraftRule(self._sources, credit, longest)
        self._chosen = Plan(0, "plain")

    def plan(self, context: int, limit: int) -> Plan:
        """Return the most that may be drafted; see `DraftLengthPolicy`."""
        self.planned, self._chosen = True, Plan(0, "plain")
        longest = min(limit, self.longest)
        return Plan(longest, "free") if longest > 0 else Plan(0, "budget")

    def choose(
        self,
        context: int,
        limit: int,
        survivals: SequenceOf[SequenceOf[float] | None],
        *,
        behind: bool,
    ) -> tuple[int, int]:
        """Return the source that drafts, and how many tokens; see `DraftRule.choose`.

        Args:
            context: how many tokens the target's caches hold.
            limit: the most tokens that may be drafted.
            survivals: of each source, of its proposal if it is free. None: it forecasts
                if it is costly, and has none if it is free.
            behind: whether a plain step is in flight.
        """
        offers = []
        for source, rates, survival in zip(
            self._sources, self._rates, survivals, strict=True
        ):
            if survival is None:
                survival = () if source.free else rates.survival(self.longest + 1)
            offers.append(Offer(source, [survival]))
        offers.sort(key=lambda offer: not offer.source.free)
        plan = self._rule.choose(context, limit, offers, behind=behind)
        self._chosen = plan
        index = self._sources.index(plan.source) if plan.length else 0
        return index, plan.length

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Learn from a round; see `DraftLengthPolicy`."""
        source = self._chosen.source
        self._rule.note(context, self._chosen, feedback)
        if feedback.drafted and source is not None:
            rates = self._rates[self._sources.index(source)]
            rates.note(feedback.drafted, feedback.accepted)

    def end(self) -> None:
        """Keep costs and acceptance."""
        self._rule.end()
        for known, rates in zip(self._known, self._rates, strict=True):
            known.keep(rates)


class RuledDrafter(CascadeDrafter):
    """Drafters of which the rule picks one in each round.

    In a batch, which plans by itself, they are a cascade.

    Args:
        drafters: in the order of the sources.
        lengths: picks one, and its length.
        target: the target's lane. It has seen the last known token while a plain step
            is in flight, for whose token the first proposed one stands.
    """

    def __init__(
        self, drafters: SequenceOf[OpenDrafter], lengths: RuleDraftLength, target: Lane
    ) -> None:
        super().__init__(*drafters)
        self._lengths, self._target = lengths, target

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Return the proposal that is worth most, cut where it pays for no more."""
        if not self._lengths.planned:
            return super().propose(sequence, limit, choose)
        self._asked = None
        survivals: list[SequenceOf[float] | None] = []
        found: dict[int, Proposal] = {}
        each = zip(self._drafters, self._lengths.free, strict=True)
        for index, (drafter, free) in enumerate(each):
            if free:
                found[index] = proposed(drafter, sequence, limit, choose)
            survivals.append(
                () if drafter.disabled else found.get(index, NOTHING).survival
            )
        context = self._target.seen
        behind = context >= len(sequence.tokens)
        index, length = self._lengths.choose(
            context, limit - behind, survivals, behind=behind
        )
        for other in found:
            if other != index or not length:
                self._drafters[other].discard()
        if not length:
            return next((found[each].until(0) for each in found), NOTHING)
        self._asked = self._drafters[index]
        if index in found:
            return found[index].until(length + behind)
        return proposed(self._asked, sequence, length + behind, choose)
