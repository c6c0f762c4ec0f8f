"""The rule for a stream whose only source is free: a lookup.

A proposal is made in every round, and the rule decides how much of it is verified:

    plan        at most so many tokens, as far as there is room
    propose     16 tokens, survival 0.9 0.8 0.4 ...
    cut         the rule's length at these chances; 0: a plain step
    note        the rule learns from the round, as the plan that it has made
"""

from collections.abc import Sequence as SequenceOf

from mlx_speculation.engine.draft_length.base import Feedback, Plan
from mlx_speculation.engine.draft_length.cost_store import Known
from mlx_speculation.engine.draft_length.rule import Credit, DraftRule, Offer, Source
from mlx_speculation.engine.drafters.base import (
    Choose,
    OpenDrafter,
    Proposal,
    WrappedDrafter,
)
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane


class FreeDraftLength:
    """Plans the most, and cuts proposals by their survival.

    Args:
        known: the costs of rounds; shared by the streams of a generator.
        credit: shared likewise.
        longest: no draft is longer.

    Attributes:
        planned: whether it plans the rounds of its stream; those of a batch it does
            not.
    """

    by_batch = True

    def __init__(self, known: Known, credit: Credit, longest: int) -> None:
        self.longest, self.planned = longest, False
        self._known, self._source = known, Source(known.costs, free=True)
        self._rule = DraftRule([self._source], credit, longest)
        self._chosen = Plan(0, "plain")

    def plan(self, context: int, limit: int) -> Plan:
        """Return the most that may be drafted; see `DraftLengthPolicy`."""
        self.planned, self._chosen = True, Plan(0, "plain")
        longest = min(limit, self.longest)
        return Plan(longest, "free") if longest > 0 else Plan(0, "budget")

    def cut(
        self, context: int, limit: int, survival: SequenceOf[float], *, behind: bool
    ) -> int:
        """Return how many tokens are to be drafted; see `DraftRule.choose`."""
        offers = [Offer(self._source, [survival])]
        self._chosen = self._rule.choose(context, limit, offers, behind=behind)
        return self._chosen.length

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Learn from a round; see `DraftLengthPolicy`."""
        self._rule.note(context, self._chosen, feedback)

    def end(self) -> None:
        """Keep the costs."""
        self._known.save_if_new()


class TrimmedDrafter(WrappedDrafter):
    """A drafter whose proposals are cut by their survival.

    Args:
        inner: the drafter.
        lengths: cuts them.
        target: the target's lane. It has seen the last known token while a plain step
            is in flight, for whose token the first proposed one stands.
    """

    def __init__(
        self, inner: OpenDrafter, lengths: FreeDraftLength, target: Lane
    ) -> None:
        super().__init__(inner)
        self._lengths, self._target = lengths, target

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Return the part of a proposal that pays for its rows."""
        draft = self.inner.propose(sequence, limit, choose)
        if draft.survival is None or not self._lengths.planned:
            return draft
        context = self._target.seen
        behind = context >= len(sequence.tokens)
        length = self._lengths.cut(
            context, limit - behind, draft.survival, behind=behind
        )
        return draft.until(length + behind if length else 0)
