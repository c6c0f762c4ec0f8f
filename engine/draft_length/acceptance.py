"""Acceptance rates of drafted tokens, by position."""

from collections.abc import Iterable
from itertools import accumulate
from operator import mul

# An average is over about this many rounds.
WINDOW = 40.0
# The prior rate: `FIRST_GUESS` at the first position, at any other the rate of the one
# before. It weighs as much as `GUESSED` rounds: with a lower weight, bad luck at a
# position that is hardly ever reached would keep drafts short.
FIRST_GUESS = 0.7
GUESSED = 8.0
# Rates of earlier streams weigh as much as this many rounds in a new stream.
KNOWN_WEIGHT = 8.0


class AcceptanceRates:
    """Exponential averages of each position's acceptance, given that of all before.

        rates.note(drafted=4, accepted=2)   # 1, 1, 0; position 3 is not counted
        rates.survival(2)                   # [r0, r0 r1]

    Args:
        rates: known rates by position; further positions begin with the prior.
        weight: the number of rounds that they weigh.
    """

    def __init__(
        self, rates: Iterable[float] = (), weight: float = KNOWN_WEIGHT
    ) -> None:
        self._hits = [rate * weight for rate in rates]
        self._tries = [weight] * len(self._hits)

    def note(self, drafted: int, accepted: float) -> None:
        """Count a round's positions up to the first rejected one."""
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
        """Return for each token the probability that it and all before are accepted."""
        return [*accumulate(self.rates(longest), mul)]

    def loosened(self) -> "AcceptanceRates":
        """Return the rates for a new stream, weighing at most `KNOWN_WEIGHT` rounds."""
        result = AcceptanceRates()
        result._tries = [min(KNOWN_WEIGHT, tries) for tries in self._tries]
        each = zip(self._hits, self._tries, result._tries, strict=True)
        result._hits = [hits * weight / tries for hits, tries, weight in each]
        return result
