"""The protocol of draft length policies: plans, and the feedback of rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from mlx_speculation.engine.timing import NO_TIME, RoundSeconds

Reason = Literal["fixed", "best", "plain", "trial", "measure", "budget", "free"]


@dataclass(frozen=True, slots=True)
class Option:
    """One draft length with its expected result."""

    length: int  # tokens to draft
    tokens: float  # expected committed tokens of a round, with correction or bonus
    seconds: float  # expected seconds of the round

    @property
    def speed(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Compared:
    """A source of drafts with the draft lengths that the rule compared."""

    name: str  # the kind of its drafts
    index: int  # its index among the sources of the rule
    free: bool  # whether its proposals cost nothing
    survival: Sequence[float]  # in a batch, the mean over the requests
    options: tuple[Option, ...]  # the lengths that may pay
    credit: float  # what its drafts may still lose, in plain steps

    @property
    def drawback(self) -> str:
        """The reason why this source does not draft."""
        name, steps = self.name, f"{self.credit:.1f} steps"
        if not self.survival:
            return f"{name} has no proposal"
        if self.credit <= 0:
            return f"{name} has no credit ({steps})"
        if not self.options:
            return f"no draft of {name} pays with a credit of {steps}"
        best = max(self.options, key=lambda option: option.speed)
        return f"{name}: {best.tokens:.2f} tokens in {best.seconds * 1e3:.1f} ms"

    def __str__(self) -> str:
        survival = " ".join(f"{chance:.2f}" for chance in self.survival)
        options = "  ".join(
            f"{one.length}: {one.tokens:.2f} in {one.seconds * 1e3:.1f} ms"
            for one in self.options
        )
        return f"{self.name} {survival}  {options}  credit {self.credit:.1f}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of the next round: the number of tokens to draft, and the reason.

    fixed     the caller has chosen the length
    best      the draft that is worth most
    trial     a draft that is not expected to pay, made to measure it
    plain     no draft pays, or the credit does not allow one
    measure   a plain step or, in a calibration, a draft, whose cost is measured
    budget    `limit` leaves no room for a draft
    free      the longest draft, until the rule has seen what free sources propose
    """

    length: int  # tokens to draft; 0 is a plain step
    reason: Reason
    source: Compared | None = None  # the source that drafts; None: any
    compared: tuple[Compared, ...] = ()
    seconds: float = 0.0  # of a plain step

    def __str__(self) -> str:
        by = "" if self.source is None else f" by {self.source.name}"
        said = f"draft {self.length} ({self.reason}){by}"
        plain = f"0: 1.00 in {self.seconds * 1e3:.1f} ms"
        compared = " | ".join([plain, *map(str, self.compared)])
        return f"{said}  {compared}" if self.compared else said

    @property
    def declined(self) -> bool:
        """Return whether a draft was possible, but not worth its time."""
        return not self.length and any(each.survival for each in self.compared)

    @property
    def drawback(self) -> str:
        """The reason why nothing is drafted."""
        if self.length:
            return "nothing was proposed"
        plain = f"a plain step takes {self.seconds * 1e3:.1f} ms"
        return "; ".join([*(each.drawback for each in self.compared), plain])


@dataclass(frozen=True, slots=True)
class Feedback:
    """Feedback of a round."""

    drafted: int  # drafted tokens, possibly fewer than planned
    accepted: float  # accepted tokens before any cut; in a batch, the mean
    seconds: float  # of the round, including drafting
    behind: bool = False  # whether it began with a plain step in flight
    ahead: bool = False  # whether the round has left a plain step in flight
    parts: RoundSeconds = NO_TIME  # the seconds by part
    fresh: bool = False  # whether it was the first round of its shape, which is slow
    reading: float = 0.0  # of the drafter's prefill, not included in `seconds`

    @property
    def steady(self) -> bool:
        """Return whether the round is a plain step that follows one and submits one."""
        return self.drafted == 0 and self.behind and self.ahead


@runtime_checkable
class DraftLengthPolicy(Protocol):
    """Decides the draft lengths of one stream.

    The calls alternate: `plan`, then `note` for the round that followed the plan. But
    during a plain step, `plan` is called for the next round before `note`. After a
    failed round, `note` is not called, and the next round follows the same plan. In a
    batch, plans are dropped and made again when requests join or leave. `note` must not
    raise.
    """

    @property
    def longest(self) -> int:
        """The largest draft length of a plan."""
        ...

    def plan(self, context: int, limit: int) -> Plan:
        """Return a plan of at most `limit` tokens; the caches hold `context` tokens."""
        ...

    def note(self, context: int, plan: Plan, feedback: Feedback) -> Plan | None:
        """Learn from a round; return the plan that it followed, or None for `plan`."""
        ...


class FixedDraftLength:
    """The same length in every round, whatever it costs."""

    def __init__(self, length: int) -> None:
        self.longest = length

    def plan(self, context: int, limit: int) -> Plan:
        """Return the fixed length, or `limit` if that is smaller."""
        return Plan(max(0, min(self.longest, limit)), "fixed")

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Learn nothing."""
