"""How many tokens to draft in a round: what decides it, and what it learns from.

Knows neither models nor tokens: a plan is made from counts and seconds alone.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from mlx_speculation.engine.timing import NO_TIME, RoundSeconds

Reason = Literal["fixed", "best", "longer", "plain", "trial", "measure", "budget"]


@dataclass(frozen=True, slots=True)
class Option:
    """One draft length, as it was judged."""

    length: int  # tokens to draft
    tokens: float  # what a round is expected to commit, correction or bonus included
    seconds: float  # what it is expected to take

    @property
    def speed(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds

    def over(self, plain: "Option") -> float:
        """Return what it takes in plain steps."""
        return self.seconds / plain.seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """How many tokens to draft in the next round, and why.

    Attributes:
        length: tokens to draft; 0 is a plain step.
        reason: "fixed": the caller named it. "best" and "plain": the best of the
            options, or there is no credit for a draft. "longer": one more than is best,
            which tells of later tokens. "trial": drafting is paused, and may pay by
            now. "measure": a plain step, which tells what drafts have to
            gain. "budget": no more than one token is wanted.
        options: what was compared, by length; of a run of plain steps, before the first
            of some.
        credit: what drafts may lose, in plain steps, see `adaptive`.
        each: of a cascade, the plan of each drafter, of which this is the longest.
    """

    length: int
    reason: Reason
    options: tuple[Option, ...] = ()
    credit: float = 0.0
    each: tuple["Plan", ...] = ()

    def __str__(self) -> str:
        compared = "  ".join(
            f"{o.length}: {o.tokens:.2f} in {o.seconds * 1e3:.1f} ms"
            for o in self.options
        )
        said = f"draft {self.length} ({self.reason})"
        said += compared and f"  {compared}  credit {self.credit:.1f}"
        if not self.each:
            return said
        others = " or ".join(f"{plan.length} ({plan.reason})" for plan in self.each)
        return f"{said}  of each drafter: {others}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a round.

    Attributes:
        drafted: tokens that were drafted; fewer than planned is possible.
        accepted: those accepted, before a cut at a stop; of a batch the mean.
        seconds: its time, drafting included.
        behind: whether a plain step was in flight when the round began. With drafts:
            they stand behind it, and its token is in the round too, with what was left
            of its time.
        ahead: whether the round has left a plain step in flight.
        parts: where the time went.
        reading: seconds that the drafter took before it to read the prompt, which are
            not in its time; 0 but for the first round of a stream that drafts.
        fresh: whether it was the first of its shape, and its time tells of making
            plans for that more than of what such rounds take.
    """

    drafted: int
    accepted: float
    seconds: float
    behind: bool = False
    ahead: bool = False
    parts: RoundSeconds = NO_TIME
    fresh: bool = False
    reading: float = 0.0

    @property
    def steady(self) -> bool:
        """Whether it is a plain step as in a long run of them.

        The first of a run submits the next one, and on a CPU, where that
        takes as long as computing it, the time of two; of the last one hardly any
        time is left.
        """
        return self.drafted == 0 and self.behind and self.ahead


@runtime_checkable
class DraftLengthPolicy(Protocol):
    """Decides the draft lengths of one stream.

    The calls alternate: `plan`, then `note` for the round that followed the plan. Of
    plain steps the next plan is asked for before the step is noted. A round that
    failed is not noted, and its plan holds for the next.
    """

    @property
    def longest(self) -> int:
        """No plan is longer."""
        ...

    def plan(self, context: int, limit: int) -> Plan:
        """Return the next round's plan.

        Args:
            context: how many tokens the target's caches hold.
            limit: the most that the budget leaves room for.
        """
        ...

    def note(self, context: int, plan: Plan, outcome: Outcome) -> None:
        """Learn from a round, which is committed by now. Must not raise."""
        ...

    def end(self) -> None:
        """Learn from the stream as a whole, once it has ended."""
        ...


class FixedDraftLength:
    """The same length in every round: reproducible, whatever it costs."""

    def __init__(self, length: int) -> None:
        self.longest = length
        self._usual = Plan(length, "fixed")

    def plan(self, context: int, limit: int) -> Plan:
        """Return the length, as far as there is room for it."""
        if 0 <= self.longest <= limit:
            return self._usual
        return Plan(max(0, min(self.longest, limit)), "fixed")

    def note(self, context: int, plan: Plan, outcome: Outcome) -> None:
        """Learn nothing."""

    def end(self) -> None:
        """Learn nothing."""
