"""A round's result: on its way, read, and cut."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.result import STEP, LogProb, Origin, origin_of
from mlx_speculation.engine.timing import RoundClock
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.models import LaneRound
from mlx_speculation.samplers import Constrained, LogProbs, Verified


@dataclass(frozen=True, slots=True)
class Submitted:
    """A forward of the target on its way, not read yet.

    Attributes:
        lane_round: the transaction; committed already where there are no drafts.
        logits: what it verifies, where they were submitted before it; None: with it,
            and so they are there when it is.
        verified: what the target makes of its rows.
    """

    lane_round: LaneRound
    logits: mx.array | None
    verified: Verified


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round's evaluation brought back.

    Attributes:
        tokens: k + 1 of them; those past the emitted ones mean nothing.
        accepted: how many drafted tokens are accepted.
        log_probs: of the emitted tokens; empty if not asked for.
    """

    tokens: list[int]
    accepted: int
    log_probs: list[LogProb]

    @property
    def emitted(self) -> list[int]:
        """The accepted tokens, then the correction or the bonus."""
        return self.tokens[: self.accepted + 1]

    @property
    def origins(self) -> list[Origin]:
        """Who wrote each of the emitted tokens."""
        drafted = len(self.tokens) - 1
        return [
            origin_of(index, self.accepted, drafted)
            for index in range(self.accepted + 1)
        ]


@dataclass(frozen=True, slots=True)
class Emitted:
    """The tokens of one round that a cut has to judge.

    Attributes:
        tokens: in order, at least one.
        log_probs: of each token; empty if not asked for.
        origins: who wrote each of them.
        complete: whether a constraint ends the text with the last one.
    """

    tokens: list[int]
    log_probs: list[LogProb]
    origins: list[Origin]
    complete: bool = False

    @classmethod
    def of(cls, *verdicts: Verdict) -> "Emitted":
        """Put together what verdicts on successive rows have emitted."""
        if len(verdicts) == 1 and len(verdicts[0].tokens) == 1:  # a plain step
            return cls(verdicts[0].tokens, verdicts[0].log_probs, [STEP])
        return cls(
            [token for verdict in verdicts for token in verdict.emitted],
            [value for verdict in verdicts for value in verdict.log_probs],
            [origin for verdict in verdicts for origin in verdict.origins],
        )

    @classmethod
    def in_turn(cls, verdicts: Sequence[Verdict], drafted: int) -> "Emitted":
        """Put together verdicts on single rows, those of a draft and one more."""
        accepted = sum(verdict.accepted for verdict in verdicts)
        return cls(
            [verdict.tokens[0] for verdict in verdicts],
            [value for verdict in verdicts for value in verdict.log_probs],
            [origin_of(row, accepted, drafted) for row in range(len(verdicts))],
        )

    @property
    def last(self) -> "Emitted":
        """The last one alone."""
        return Emitted(
            self.tokens[-1:], self.log_probs[-1:], self.origins[-1:], self.complete
        )

    def under(self, text: Constrained) -> "Emitted":
        """Return those that stay under a constraint."""
        followed = text.follow(self.tokens)
        keep = followed.keep
        return Emitted(
            self.tokens[:keep],
            self.log_probs[:keep],
            self.origins[:keep],
            followed.complete,
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a round's emitted tokens end.

    Attributes:
        keep: how many of the round's tokens so far stay, from 1.
        reason: "stop" or "length" when the generation ends there, else None.
    """

    keep: int
    reason: str | None


# Called once in a round, or for one token after the other.
MakeCut = Callable[[Emitted], Cut]


def wait_for(submitted: Submitted, clock: RoundClock) -> None:
    """Wait for the logits, then for what is made of them."""
    if submitted.logits is None:
        clock.wait("verify", submitted.verified.tokens)
        return
    clock.wait("verify", submitted.logits)
    clock.wait("sampler", submitted.verified.tokens)


def read(submitted: Submitted, clock: RoundClock | None = None) -> Verdict:
    """Read a round's result: the one place where the host waits.

    Args:
        submitted: what is on its way.
        clock: looked at when the logits are there, and when the tokens are.

    Raises:
        NonFiniteLogitsError: a row holds a NaN, or no finite largest value.
    """
    if clock is not None:
        wait_for(submitted, clock)
    return verdict_of(submitted.verified)


def verdict_of(verified: Verified) -> Verdict:
    """Read what a forward's rows were made of, see `read`."""
    tokens: Any = verified.tokens.tolist()  # waits; the others came with it
    normals: Any = verified.normalizers.tolist()
    if not all(map(math.isfinite, normals)):
        unusable = sum(not math.isfinite(value) for value in normals)
        raise NonFiniteLogitsError(
            f"{unusable} of {len(normals)} rows of the target's logits hold a NaN or "
            "no finite largest value. The round was rolled back. Check the weights, "
            "load the model in float32, or see what a constraint and logits "
            "processors leave of them, and whether a sampler chose an id without a row."
        )
    count: Any = 0 if verified.accepted is None else verified.accepted.item()
    report = verified.log_probs
    return Verdict(tokens, count, [] if report is None else _listed(report, count + 1))


def _listed(report: LogProbs, rows: int) -> list[LogProb]:
    """Return the report on the first `rows` rows as plain numbers."""
    values: Any = report.tokens[:rows].tolist()
    ids: Any = report.top_ids[:rows].tolist()
    top: Any = report.top[:rows].tolist()
    return [
        LogProb(
            values[row],
            tuple(zip(ids[row], top[row], strict=True)),
            None if report.rows is None else report.rows[row],
        )
        for row in range(len(values))  # one, where rows are decided in turn
    ]
