"""Where a draft ends early: how sure its drafter is tells which tokens are worth it.

A drafter is sure of some tokens and of others not, and greedy text follows it. On the
dense demo target, code at temperature 0, by the largest probability of the draft model:

    largest probability    0.1   0.2   0.3   0.4   0.5   0.6   0.7   0.8   0.9
    accepted               0.12  0.42  0.58  0.66  0.82  0.96  0.98  0.96  0.99

So a chain goes on while it is likely to be accepted to its end, and ends where it is
not: replayed, that is a twentieth more tokens per second than with the best fixed
length. Where tokens are drawn by chance it tells less (0.5 to 0.9 at temperature 1),
and what is drafted in vain meanwhile costs more than it gains.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx

# Largest probabilities are divided by these, and each class is taken for its middle
# until it was seen, which counts for so many tokens.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
GUESSED = 4.0
# Tokens of its class that an average looks back on.
WINDOW = 100.0
_MIDDLES = [(low + high) / 2 for low, high in pairwise((0.0, *EDGES, 1.0))]


@dataclass(slots=True)
class Certainties:
    """How often tokens were accepted, by the largest probability of their rows.

    Each given that the tokens before it were accepted.
    """

    _tries: list[float] = field(default_factory=lambda: [GUESSED] * (len(EDGES) + 1))
    _hits: list[float] = field(
        default_factory=lambda: [GUESSED * middle for middle in _MIDDLES]
    )

    def accepted(self, certainty: float) -> float:
        """Return the probability that a token of this certainty is accepted."""
        place = bisect_right(EDGES, certainty)
        return self._hits[place] / self._tries[place]

    def note(self, certainties: Sequence[float], accepted: int) -> None:
        """Count the tokens of a draft up to the first that was rejected."""
        for index, certainty in enumerate(certainties[: accepted + 1]):
            place, keep = bisect_right(EDGES, certainty), 1 - 1 / WINDOW
            self._tries[place] = self._tries[place] * keep + 1
            self._hits[place] = self._hits[place] * keep + (index < accepted)


@dataclass(frozen=True, slots=True)
class Stop:
    """When a draft ends early."""

    # A token that is accepted, with all before it, less probably than this is not worth
    # its time
    least: float
    certainties: Certainties  # how probable that is

    def kept(self, certainties: Sequence[float]) -> int:
        """Return how many tokens of a chain are worth their time, at least 1."""
        reached, count = 1.0, 0
        for certainty in certainties:
            reached *= self.certainties.accepted(certainty)
            if count and reached < self.least:
                break
            count += 1
        return count


def largest_probability(logits: mx.array) -> mx.array:
    """Return the largest probability of a row of logits [1, vocab], float32 []."""
    row = logits.astype(mx.float32)
    return mx.exp(row.max() - mx.logsumexp(row))
