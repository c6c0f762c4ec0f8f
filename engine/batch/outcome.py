"""A batch's round, submitted and read: an outcome of each row, or what it failed with.

It is read with one evaluation for all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.round.outcome import RoundOutcome, outcomes
from mlx_speculation.models import BatchRound
from mlx_speculation.samplers import BatchVerified

Read = RoundOutcome | Exception


@dataclass(frozen=True, slots=True, eq=False)
class BatchStep:
    """A forward over one token of every row, not read yet, that is kept whole."""

    lane_round: BatchRound  # the transaction, committed
    verified: BatchVerified  # what the target makes of the rows that were there
    tokens: mx.array  # uint32 [rows], what each row that is still there chooses
    places: tuple[int, ...]  # where each of these stood

    def only(self, stay: Sequence[int]) -> "BatchStep":
        """Return the step without the rows that have left."""
        places = tuple(self.places[index] for index in stay)
        return replace(self, tokens=self.tokens[mx.array(list(stay))], places=places)

    def read(self) -> list[Read]:
        """Wait for it, and return what each row got."""
        found = read_batch(self.verified)
        return [found[place] for place in self.places]


def read_batch(
    verified: BatchVerified, drafted: Sequence[int] | None = None
) -> dict[int, Read]:
    """Wait for what a round has brought: the one place where the host waits."""
    mx.eval(verified.arrays)
    found: dict[int, Read] = dict(verified.failed)
    for one in verified.decided:
        counts = [0 if drafted is None else drafted[index] for index in one.members]
        found |= zip(one.members, outcomes(one.verified, counts), strict=True)
    return found


def behind(step: Read | None, found: Read) -> Read:
    """Return what a row got of a step that came first, if any, and of its draft."""
    if step is None or isinstance(found, Exception):
        return found if not isinstance(step, Exception) else step
    return step if isinstance(step, Exception) else found.behind(step)


def kept(found: Read) -> int:
    """Return how many of the fed tokens a row keeps, after its cut."""
    return 0 if isinstance(found, Exception) else 1 + _accepted(found)


def settled(found: Read, draft: Proposal) -> int | None:
    """Return how many tokens of its draft a drafter may keep; None: the row failed."""
    if isinstance(found, Exception):
        return None
    return found.settled(draft, _accepted(found))


def _accepted(found: RoundOutcome) -> int:
    """Return how many accepted tokens stay after a cut."""
    return min(found.accepted, len(found.tokens) - found.first)
