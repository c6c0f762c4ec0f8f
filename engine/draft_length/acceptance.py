"""Acceptance rates of drafted tokens, by position."""

from collections.abc import Iterable
from itertools import accumulate
from operator import mul

# Rounds that an average looks back on.
WINDOW = 40.0
# What a position is taken for before it was tried, and in how many rounds: the first
# for this, every other one for the one before it. With less, bad luck at a position
# that is hardly ever reached keeps drafts short.
FIRST_GUESS = 0.7
GUESSED = 8.0
# What was learnt from earlier streams counts for so many rounds in a new one.
KNOWN_WEIGHT = 8.0


class AcceptanceRates:
    """Exponential averages of acceptance, each given that the tokens before were.

        rates.note(drafted=4, accepted=2)   # yes, yes, no; the fourth was not asked
        rates.survival(2)                   # [r0, r0 r1]

    Args:
        rates: what is known before, by position; the first guess otherwise.
        weight: how many rounds it counts for.
    """

    def __init__(
        self, rates: Iterable[float] = (), weight: float = KNOWN_WEIGHT
    ) -> None:
        self._hits = [rate * weight for rate in rates]
        self._tries = [weight] * len(self._hits)

    def note(self, drafted: int, accepted: float) -> None:
        """Count a round's positions up to the first that was rejected."""
        keep = 1 - 1 / WINDOW
        for position in range(min(int(accepted) + 1, drafted)):
            if position == len(self._tries):
                self._hits.append(0.0)
                self._tries.append(0.0)
            self._tries[position] = self._tries[position] * keep + 1
            self._hits[position] = self._hits[position] * keep + (position < accepted)

    def rates(self, count: int) -> list[float]:
        """Return the rates of the first `count` positions."""
        result, last = [], FIRST_GUESS
        for position in range(count):
            if position < len(self._tries):
                hits, tries = self._hits[position], self._tries[position]
                last = (hits + GUESSED * last) / (tries + GUESSED)
            result.append(last)
        return result

    def survival(self, longest: int) -> list[float]:
        """Return the chance of each token that it and those before it are right."""
        return [*accumulate(self.rates(longest), mul)]

    def loosened(self) -> "AcceptanceRates":
        """Return the same rates for a new stream, of `KNOWN_WEIGHT` rounds at most."""
        result = AcceptanceRates()
        result._tries = [min(KNOWN_WEIGHT, tries) for tries in self._tries]
        each = zip(self._hits, self._tries, result._tries, strict=True)
        result._hits = [hits * weight / tries for hits, tries, weight in each]
        return result
