"""Outcomes of a round, one for each request.

If 2 of 4 drafted tokens are accepted, a round emits three tokens: the two accepted ones
and the correction. If all 4 are accepted, it emits five tokens, the last of which is
the bonus. A round without a draft emits one token, of origin "step".
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import repeat
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
    """The tokens that a round emits for one request."""

    tokens: list[int]  # the accepted tokens, then the correction or the bonus
    origins: list[Origin]  # of each token
    drafted: int = 0
    accepted: int = 0  # a cut does not change it
    log_probs: Sequence[LogProb] = ()  # of each token; empty if not asked for
    # 1 if `tokens` begins with the token of a plain step that was in flight, else 0
    first: int = 0
    complete: bool = False  # whether a constraint ends the text after the last token
    reason: str | None = None  # "stop" or "length" if the text ends with this round

    def until(self, keep: int, reason: str | None = None) -> "RoundOutcome":
        """Return the outcome cut to `keep` tokens, at least 1, with this `reason`."""
        return replace(
            self,
            tokens=self.tokens[:keep],
            origins=self.origins[:keep],
            log_probs=self.log_probs[:keep],
            reason=reason,
        )

    def under(self, text: Constrained) -> "RoundOutcome":
        """Return the outcome cut to the tokens that a constraint allows."""
        followed = text.follow(self.tokens)
        return replace(self.until(followed.keep), complete=followed.complete)

    def after_step(self, step: "Read") -> "Read":
        """Return the outcome with a plain step's token first, or the step's error."""
        if isinstance(step, Exception):
            return step
        return replace(
            self,
            tokens=step.tokens + self.tokens,
            origins=step.origins + self.origins,
            log_probs=[*step.log_probs, *self.log_probs],
            first=1,
        )


# Cuts an outcome at a stop text, a stop token or the budget, before the commit.
Cut = Callable[[RoundOutcome], RoundOutcome]
Read = RoundOutcome | Exception  # the outcome of one request, or its error


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A submitted forward of the target whose result is not read yet."""

    lane_round: RequestRound  # the transaction; already committed for a plain step
    fed: int  # how many known tokens of each request were fed before the draft
    logits: mx.array | None  # None: submitted together with `decided`
    decided: Decided
    tokens: mx.array  # uint32 [requests]: tokens that a plain step chose; else unused
    # By place, for requests decided row by row: each `next` decides one more row
    turns: Mapping[int, Iterator[Verified]] = field(default_factory=dict)
    # Places that the remaining requests had in this forward; None: no request has left
    places: Sequence[int] | None = None

    def only(self, stay: Sequence[int]) -> "Pending":
        """Return the step reduced to the requests at these places."""
        before = self.places
        places = [*stay] if before is None else [before[place] for place in stay]
        return replace(self, tokens=self.tokens[mx.array([*stay])], places=places)

    def wait(self, clock: RoundClock) -> None:
        """Wait for the logits, then for the decided tokens."""
        tokens = []
        for group in self.decided.groups:
            tokens.append(group.verified.tokens)
        if self.logits is None:
            clock.wait("verify", *tokens)
            return
        clock.wait("verify", self.logits)
        clock.wait("sampler", *tokens)

    def read(self, drafts: Sequence[Proposal] = ()) -> list[Read]:
        """Return the outcome of every request; call it after `wait`."""
        result: dict[int, Read] = dict(self.decided.failed)
        for members, verified in self.decided.groups:
            counts = []
            for place in members:
                draft = drafts[place] if drafts else NOTHING
                tree = draft.branches
                counts.append(len(draft.tokens) if tree is None else tree.levels)
            result.update(zip(members, outcomes(verified, counts), strict=True))
        for place in self.turns:
            result[place] = RoundOutcome([], [])
        places = range(len(result)) if self.places is None else self.places
        return [*map(result.__getitem__, places)]


def outcomes(
    verified: Verified, drafted: Sequence[int]
) -> list[RoundOutcome | NonFiniteLogitsError]:
    """Return the outcomes of requests with equally many decided rows."""
    tokens: Any = verified.tokens.tolist()  # waits for all arrays of `verified`
    normals: Any = verified.normalizers.tolist()
    counts: Any = 0 if verified.accepted is None else verified.accepted.tolist()
    if isinstance(counts, int):
        counts = [counts] * len(drafted)
    width = len(tokens) // len(drafted)
    result: list[RoundOutcome | NonFiniteLogitsError] = []
    for place, (k, accepted) in enumerate(zip(drafted, counts, strict=True)):
        # Rows after the first rejection are not used, nor is padding.
        emitted = min(accepted + 1, width)  # width is 1 if rows are decided one by one
        rows = slice(place * width, place * width + emitted)
        if not all(map(math.isfinite, normals[rows])):
            result.append(_unusable(normals[rows]))
            continue
        origins = [*map(origin_of, range(emitted), repeat(accepted), repeat(k))]
        report = () if verified.log_probs is None else listed(verified.log_probs, rows)
        result.append(RoundOutcome(tokens[rows], origins, k, accepted, report))
    return result


@lru_cache
def origin_of(index: int, accepted: int, drafted: int) -> Origin:
    """Return the origin of the token that row `index` of a round emits."""
    if index < accepted:
        return Origin("accepted", index)
    if not drafted:
        return STEP
    return Origin("bonus" if accepted == drafted else "correction")


def _unusable(normals: Sequence[float]) -> NonFiniteLogitsError:
    unusable = sum(not math.isfinite(value) for value in normals)
    return NonFiniteLogitsError(
        f"{unusable} of {len(normals)} rows of the target's logits hold a NaN or have "
        "no finite maximum. The round was rolled back; in a batch, only this "
        "request ends. Check the weights, load the model in float32, or check whether "
        "constraint and logits processors mask every id, and whether a sampler chose "
        "an id that the embedding has no row for."
    )
