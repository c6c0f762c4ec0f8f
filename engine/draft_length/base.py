"""Contract of draft length policies: plans, and the feedback of rounds.

Knows neither models nor tokens: a plan is made from counts and seconds alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from mlx_speculation.engine.timing import NO_TIME, RoundSeconds

Reason = Literal["fixed", "best", "plain", "trial", "measure", "budget", "free"]


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

    def worth(self, rate: float) -> float:
        """Return the tokens that it brings beyond those usual in its time."""
        return self.tokens - rate * self.seconds

    def __str__(self) -> str:
        return f"{self.length}: {self.tokens:.2f} in {self.seconds * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class Compared:
    """A source of drafts, as it was judged.

    Attributes:
        source: one that `rule` knows.
        survival: of its proposal, or forecast; the mean over requests.
        options: the lengths that may pay.
        credit: what its drafts may lose, in plain steps, see `rule`.
    """

    source: Any
    survival: Sequence[float]
    options: tuple[Option, ...]
    credit: float

    @property
    def drawback(self) -> str:
        """The reason why nothing of it is drafted."""
        if not self.survival:
            return f"{self.source.name} has no proposal"
        if self.credit <= 0:
            return f"{self.source.name} has no credit ({self.credit:.1f} steps)"
        if not self.options:
            credit = f"credit {self.credit:.1f} steps"
            return f"drafts of {self.source.name} take too long ({credit})"
        best = max(self.options, key=lambda option: option.speed)
        return (
            f"{self.source.name}: {best.tokens:.2f} tokens in {best.seconds * 1e3:.1f} "
            "ms"
        )

    def __str__(self) -> str:
        survival = " ".join(f"{chance:.2f}" for chance in self.survival)
        options = "  ".join(map(str, self.options))
        return f"{self.source.name} {survival}  {options}  credit {self.credit:.1f}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of the next round: the number of tokens to draft, and the reason.

    fixed     the caller has named the length
    best      of the options
    trial     drafting is paused, and may pay by now
    plain     no draft pays, or there is no credit for one
    measure   a plain step, which tells what drafts have to gain
    budget    no more than one token is wanted
    free      at most: the proposal costs nothing, and is cut when it is there
    """

    length: int  # tokens to draft; 0 is a plain step
    reason: Reason
    source: Any = None  # who drafts, of the sources that `rule` knows
    compared: tuple[Compared, ...] = ()
    seconds: float = 0.0  # of a plain step

    @property
    def pick(self) -> tuple[int, int]:
        """The index of the source that drafts, and the length."""
        return self.source.index if self.length else 0, self.length

    def __str__(self) -> str:
        said = f"draft {self.length} ({self.reason})"
        if not self.compared:
            return said
        compared = [str(Option(0, 1.0, self.seconds)), *map(str, self.compared)]
        by = f" by {self.source.name}" if self.length else ""
        return f"{said}{by}  {' | '.join(compared)}"

    @property
    def declined(self) -> bool:
        """Return whether a draft was possible, and not worth its time."""
        return not self.length and any(each.survival for each in self.compared)

    @property
    def drawback(self) -> str:
        """The reason why nothing is drafted by it."""
        if self.length:
            return "nothing was proposed"
        plain = f"a plain step takes {self.seconds * 1e3:.1f} ms"
        return "; ".join([*(each.drawback for each in self.compared), plain])


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback of a round."""

    drafted: int  # tokens; fewer than planned is possible
    accepted: float  # of them, before a cut at a stop; of a batch the mean
    seconds: float  # its time, drafting included
    # Whether a plain step was in flight when the round began. With drafts: they stand
    # behind it, and its token is in the round too, with what was left of its time
    behind: bool = False
    ahead: bool = False  # whether the round has left a plain step in flight
    parts: RoundSeconds = NO_TIME  # where the time went
    # Whether it was the first of its shape, and its time tells of making plans for that
    # more than of what such rounds take
    fresh: bool = False
    # Seconds that the drafter took before it to read the prompt, which are not in its
    # time; 0 but for the first round of a stream that drafts
    reading: float = 0.0

    @property
    def steady(self) -> bool:
        """Return whether it is a plain step between two others.

        Where a step is computed while it is submitted, as on a CPU, the first of a run
        takes the time of two, and of the last one hardly any is left.
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

    def note(self, context: int, plan: Plan, feedback: Feedback) -> Plan | None:
        """Learn from a round, which is committed by now. Must not raise.

        Returns:
            The plan that was followed, if it was made after `plan`.
        """
        ...

    def end(self) -> None:
        """Learn from the stream as a whole, once it has ended."""
        ...


class FixedDraftLength:
    """The same length in every round: reproducible, whatever it costs."""

    def __init__(self, length: int) -> None:
        self.longest = length

    def plan(self, context: int, limit: int) -> Plan:
        """Return the length, as far as there is room for it."""
        return Plan(max(0, min(self.longest, limit)), "fixed")

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Learn nothing."""

    def end(self) -> None:
        """Learn nothing."""
