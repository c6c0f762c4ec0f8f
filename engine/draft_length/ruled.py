"""The rule for the drafts of one stream, and the drafter that it chooses.

A single costly source is planned by its forecast. With a free source, or several
sources, `plan` leaves room for the longest draft, and `propose` calls `choose` after
the free sources have proposed. `note` then learns by the plan of `choose`.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.draft_length.costs import Source
from mlx_speculation.engine.draft_length.rule import Credit, DraftRule, Offers, Survival
from mlx_speculation.engine.drafters.base import NOTHING, Choose, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.cascade import CascadeDrafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane


class RuleDraftLength(DraftRule):
    """The policy that follows the rule in one stream."""

    def __init__(
        self, sources: SequenceOf[Source], credit: Credit, longest: int
    ) -> None:
        super().__init__(sources, credit, longest)
        self.drafter: RuledDrafter | None = None  # if the rule is `late`
        # Returns each source's own forecast, see `OpenDrafter`
        self.forecast: Callable[[int], SequenceOf[Survival | None]] = lambda _: (
            [None] * len(sources)
        )
        self._chosen: Plan | None = None  # the plan that `choose` made for this round

    def survivals(self) -> list[Survival]:
        """Return each source's survival, as forecast or by its rates; () if free."""
        longest = self.longest + 1  # the first may be a guess of a step's token
        result: list[Survival] = []
        for source, survival in zip(self.sources, self.forecast(longest), strict=True):
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

    A batch decides for all its requests: it calls `offer` of each drafter, and sets
    `chosen` to a source and a length before it calls `propose`.
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
        """Let free sources propose; return survivals, of costly sources if `costly`."""
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
        # A plain step is in flight; the first proposed token guesses its token
        behind = self._target.seen >= len(sequence.tokens)
        if self.chosen is None:
            offered = [self.offer(sequence, limit, choose)]
            self.chosen = self._lengths.choose(
                self._target.seen, limit - behind, offered, behind=behind
            )
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
