"""How probable it is that a drafted token is accepted, position by position."""

from collections.abc import Iterable

# Rounds that an average looks back on. Fewer follow a change of text sooner, more tell
# nearer rates apart: with 40 the standard error of a rate of 0.7 is 0.07.
WINDOW = 40.0
# What the rate of the position before counts for, in rounds: a position that was
# hardly ever reached is as good as the one before it. Positions behind the usual draft
# are not seen, so that with less a short draft would stay short on a text where all of
# it is accepted.
INHERITED = 4.0
# What the first position is taken for, and in how many rounds: with one, bad
# luck at the start of simulated texts paused drafts that were right four times in five.
FIRST_GUESS = 0.7
GUESSED = 2.0


class AcceptanceRates:
    """Exponential averages of acceptance, each given that the tokens before were.

        rates.note(drafted=4, accepted=2)   # yes, yes, no; the fourth was not asked
        rates.expected(2)                   # 1 + r0 + r0 r1

    Args:
        rates: what is known before, by position; the first guess otherwise.
        weight: how many rounds it counts for.
    """

    def __init__(self, rates: Iterable[float] = (), weight: float = 0.0) -> None:
        self._hits = [rate * weight for rate in rates]
        self._tries = [weight] * len(self._hits)
        self._guessed = GUESSED

    def note(self, drafted: int, accepted: int) -> None:
        """Count a round's positions up to the first that was rejected."""
        for position in range(min(accepted + 1, drafted)):
            if position == len(self._tries):
                self._hits.append(0.0)
                self._tries.append(0.0)
            keep = 1 - 1 / WINDOW
            self._tries[position] = self._tries[position] * keep + 1
            hit = float(position < accepted)
            self._hits[position] = self._hits[position] * keep + hit

    def rates(self, count: int) -> list[float]:
        """Return the rates of the first `count` positions."""
        found, last = [], FIRST_GUESS
        for position in range(count):
            known = position < len(self._tries)
            hits = self._hits[position] if known else 0.0
            tries = self._tries[position] if known else 0.0
            inherited = INHERITED if position else self._guessed
            last = (hits + inherited * last) / (tries + inherited)
            found.append(last)
        return found

    def expected(self, longest: int) -> list[float]:
        """Return the tokens that drafts of 0 to `longest` are expected to commit.

        1 + r0 + r0 r1 + ...: correction or bonus, and every accepted token.
        """
        found, reached = [1.0], 1.0
        for rate in self.rates(longest):
            reached *= rate
            found.append(found[-1] + reached)
        return found

    def take(self, other: "AcceptanceRates") -> None:
        """Become equal to other averages."""
        self._hits, self._tries = list(other._hits), list(other._tries)
        self._guessed = other._guessed

    @property
    def known(self) -> int:
        """How many positions were ever tried."""
        return len(self._tries)

    @property
    def tried(self) -> float:
        """For how many rounds the rate of the first position counts."""
        return self._tries[0] if self._tries else 0.0

    def loosened(self, weight: float) -> "AcceptanceRates":
        """Return the same rates, which count for at most so many rounds each.

        So does the guess: else it would come back with each new stream.
        """
        found = AcceptanceRates()
        if self._tries and self._tries[0] > weight:
            found._guessed = self._guessed * weight / self._tries[0]
        for hits, tries in zip(self._hits, self._tries, strict=True):
            factor = min(1.0, weight / tries) if tries else 1.0
            found._hits.append(hits * factor)
            found._tries.append(tries * factor)
        return found
