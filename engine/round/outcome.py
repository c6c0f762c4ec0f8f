"""Outcomes of a round, by request.

With k = 4 drafts of which 2 are accepted a round emits three tokens, accepted at place
0, accepted at place 1 and the correction, and with all 4 accepted five, the last a
bonus. A round without drafts emits a step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.drafters.base import NOTHING, Proposal
from mlx_speculation.engine.result import STEP, LogProb, Origin, listed
from mlx_speculation.engine.timing import RoundClock
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.models import RequestRound
from mlx_speculation.samplers import Constrained, Decided, Verified


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The tokens that a round emits, and where they end."""

    tokens: list[int]  # the accepted tokens, then the correction or the bonus
    origins: list[Origin]  # who wrote each of them
    drafted: int = 0  # how many tokens were drafted
    accepted: int = 0  # how many of them were accepted, before a cut
    log_probs: Sequence[LogProb] = ()  # of each token; empty if not asked for
    first: int = 0  # how many of the tokens are a plain step's that came before, 0 or 1
    complete: bool = False  # whether a constraint ends the text with the last one
    # "stop" or "length" where the generation ends with them, else None
    reason: str | None = None

    def until(self, keep: int, reason: str | None = None) -> "RoundOutcome":
        """Return the first `keep` tokens, from 1, and why the text ends there."""
        return replace(
            self,
            tokens=self.tokens[:keep],
            origins=self.origins[:keep],
            log_probs=self.log_probs[:keep],
            reason=reason,
        )

    def under(self, text: Constrained) -> "RoundOutcome":
        """Return the tokens that stay under a constraint."""
        followed = text.follow(self.tokens)
        return replace(self.until(followed.keep), complete=followed.complete)

    def behind(self, step: "Read") -> "Read":
        """Return it with a plain step's token before its own, if that has one."""
        if isinstance(step, Exception):
            return step
        return replace(
            self,
            tokens=step.tokens + self.tokens,
            origins=step.origins + self.origins,
            log_probs=[*step.log_probs, *self.log_probs],
            first=1,
        )


# Cuts the emitted tokens at a stop or the budget, before anything is committed.
Cut = Callable[[RoundOutcome], RoundOutcome]
Read = RoundOutcome | Exception  # of one request, or why it has none


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A forward of the target that was submitted and is not read."""

    # The transaction; committed already where there are no drafts
    lane_round: RequestRound
    fed: int  # how many tokens of each request it was fed before a draft
    # What it verifies, where they were submitted before it; None: with it, and so they
    # are there when it is
    logits: mx.array | None
    decided: Decided  # what the target makes of the requests' rows
    tokens: mx.array  # uint32 [requests], of a step: the chosen ones
    # What decides on the next row of requests whose rows are decided in turn
    turns: Mapping[int, Iterator[Verified]] = field(default_factory=dict)
    # Where those that are still there stood; None: where they stand
    places: Sequence[int] | None = None

    def only(self, stay: Sequence[int]) -> "Pending":
        """Return a step without the requests that have left."""
        before = self.places
        places = [*stay] if before is None else [before[place] for place in stay]
        return replace(self, tokens=self.tokens[mx.array([*stay])], places=places)

    def wait(self, clock: RoundClock) -> None:
        """Wait for the logits, then for what is made of them."""
        tokens = []
        for group in self.decided.groups:
            tokens.append(group.verified.tokens)
        if self.logits is None:
            clock.wait("verify", *tokens)
            return
        clock.wait("verify", self.logits)
        clock.wait("sampler", *tokens)

    def read(self, drafts: Sequence[Proposal] = ()) -> list[Read]:
        """Return the outcome of every request, which has been waited for.

        Args:
            drafts: of each of them; of a step, none.
        """
        result: dict[int, Read] = dict(self.decided.failed)
        for members, verified in self.decided.groups:
            counts = []
            for place in members:
                draft = drafts[place] if drafts else NOTHING
                tree = draft.branches
                counts.append(len(draft.tokens) if tree is None else tree.levels)
            result.update(zip(members, outcomes(verified, counts), strict=True))
        for place in self.turns:
            result[place] = EMPTY
        places = range(len(result)) if self.places is None else self.places
        return [*map(result.__getitem__, places)]


EMPTY = RoundOutcome([], [])


def outcome_of(verified: Verified) -> RoundOutcome:
    """Read what one request's rows were made of, or raise NonFiniteLogitsError."""
    (result,) = outcomes(verified, [len(verified.tokens) - 1])
    if isinstance(result, NonFiniteLogitsError):
        raise result
    return result


def outcomes(
    verified: Verified, drafted: Sequence[int]
) -> list[RoundOutcome | NonFiniteLogitsError]:
    """Read what the rows of requests that were decided together were made of.

    Args:
        verified: the same number of rows for each of them, one after the other.
        drafted: how many tokens each of them has drafted.
    """
    tokens: Any = verified.tokens.tolist()  # waits; the others came with it
    normals: Any = verified.normalizers.tolist()
    counts: Any = 0 if verified.accepted is None else verified.accepted.tolist()
    if isinstance(counts, int):
        counts = [counts] * len(drafted)
    width = len(tokens) // len(drafted)
    result: list[RoundOutcome | NonFiniteLogitsError] = []
    for place, (k, accepted) in enumerate(zip(drafted, counts, strict=True)):
        # Rows behind the first rejection mean nothing, and neither does padding.
        emitted = min(accepted + 1, width)  # one, where rows are decided in turn
        rows = slice(place * width, place * width + emitted)
        if not all(map(math.isfinite, normals[rows])):
            result.append(_unusable(normals[rows]))
            continue
        origins = [*_origins(emitted, accepted, k)]
        report = () if verified.log_probs is None else listed(verified.log_probs, rows)
        result.append(RoundOutcome(tokens[rows], origins, k, accepted, report))
    return result


@lru_cache
def _origins(emitted: int, accepted: int, drafted: int) -> tuple[Origin, ...]:
    return tuple(origin_of(index, accepted, drafted) for index in range(emitted))


def origin_of(index: int, accepted: int, drafted: int) -> Origin:
    """Return who wrote the token of a round's row, counted from 0."""
    if index < accepted:
        return Origin("accepted", index)
    if not drafted:
        return STEP
    return Origin("bonus" if accepted == drafted else "correction")


def _unusable(normals: Sequence[float]) -> NonFiniteLogitsError:
    unusable = sum(not math.isfinite(value) for value in normals)
    return NonFiniteLogitsError(
        f"{unusable} of {len(normals)} rows of the target's logits hold a NaN or no "
        "finite largest value. The round was rolled back; of a batch, this row alone "
        "ends. Check the weights, load the model in float32, or see what a constraint "
        "and logits processors leave of them, and whether a sampler chose an id "
        "without a row."
    )
