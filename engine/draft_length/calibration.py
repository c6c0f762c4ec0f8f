"""Calibration: what is measured, and where the time of rounds goes.

It decides nothing: a draft length is chosen by what whole rounds cost. Differences tell
the rest: of `draft` between two lengths the draft's step, of one length without such
steps what a head's refresh and a first draft take.
"""

from dataclasses import astuple
from statistics import median
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Outcome, Plan
from mlx_speculation.engine.draft_length.costs import bucket_of
from mlx_speculation.engine.drafters.base import Choose, Draft
from mlx_speculation.engine.drafters.cascade import Cascade
from mlx_speculation.engine.drafters.source import DraftSource, members_of
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.models import Lane

# Medians of each part by itself, by context bucket and draft length; 0 is a plain step.
PartsTable = dict[int, dict[int, RoundSeconds]]


class NotingParts:
    """A policy that hands on everything, and notes the parts of rounds.

    With a context, all rounds count for that, however the text grows meanwhile.

    Attributes:
        longest: no plan is longer.
    """

    def __init__(self, policy: DraftLengthPolicy, context: int | None = None) -> None:
        self._policy = policy
        self._context = context
        self.longest = policy.longest
        self._noted: dict[int, dict[int, list[RoundSeconds]]] = {}
        self._drafted = False

    def plan(self, context: int, limit: int) -> Plan:
        """Return the policy's plan."""
        return self._policy.plan(self._at(context), limit)

    def note(self, context: int, plan: Plan, outcome: Outcome) -> None:
        """Let the policy learn, and keep the parts of a round like those before it.

        The first drafted round after plain steps reads what the draft has missed; of
        plain steps those tell that are `steady`.
        """
        context = self._at(context)
        self._policy.note(context, plan, outcome)
        drafts = outcome.drafted > 0
        usual = outcome.steady or (drafts and not outcome.behind)
        if usual and drafts == self._drafted:
            bucket = self._noted.setdefault(bucket_of(context), {})
            bucket.setdefault(outcome.drafted, []).append(outcome.parts)
        self._drafted = drafts

    def _at(self, context: int) -> int:
        return context if self._context is None else self._context

    def end(self) -> None:
        """Let the policy learn from the stream as a whole."""
        self._policy.end()

    def table(self) -> PartsTable:
        """Return the medians."""
        return {
            bucket: {length: _medians(found) for length, found in sorted(own.items())}
            for bucket, own in self._noted.items()
        }


def _medians(found: list[RoundSeconds]) -> RoundSeconds:
    parts = zip(*(astuple(one) for one in found), strict=True)
    return RoundSeconds(*(median(part) for part in parts))


def measured_draft(draft: DraftSource | None) -> DraftSource:
    """Return what a calibration lets draft: a draft without its lookups."""
    others = [source for source in members_of(draft) if source.measurable]
    if len(others) > 1:
        return Cascade(*others)
    return others[0] if others else ConstantDrafter()


class ConstantDrafter(DraftSource):
    """Proposes the last token again, as often as it is asked to.

    What a lookup proposes depends on the text, what it costs does not. It has no state,
    so that many streams may share one.
    """

    kind = "filler"

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "ConstantDrafter":
        """Return itself."""
        return self

    def begin(self, sequence: Sequence) -> None:
        """Do nothing."""

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Propose `limit` tokens."""
        tokens = mx.array(sequence.tokens[-1:] * limit, mx.uint32)
        return Draft(tokens, source=self.kind)

    def settle(self, accepted: int) -> None:
        """Do nothing."""

    def discard(self) -> None:
        """Do nothing."""
