"""What a round costs, by the number of drafted tokens and the length of the context.

Costs are medians of the last rounds of a length, so that one slow round decides
nothing. Lengths between measured ones are on straight lines, those beyond go on at half
the slope: a guess that errs to the cheap side is tried, and corrected.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

# Rounds that a median is of.
SAMPLES = 9
# A plain step is known after so many: drafts are judged by it.
LEAST_PLAIN = 2
# What was known before counts for so many rounds.
KNOWN_SAMPLES = 4
# Of an unknown machine a drafted token is taken for so much of a plain step.
GUESSED_SHARE = 0.25
# Contexts up to here cost about the same; beyond it every doubling is a bucket.
SHORT_CONTEXT = 512

CostTable = dict[int, dict[int, float]]


def bucket_of(context: int) -> int:
    """Return the bucket of a number of tokens: 0 up to 512, 1 up to 1,024, ..."""
    return ((max(1, context) - 1) // SHORT_CONTEXT).bit_length()


class RoundCosts:
    """Seconds of rounds by context bucket and draft length; 0 is a steady plain step.

    Args:
        known: seconds by bucket and length, as `table` returns them.
        cold: see `note_cold`; 0: not known.

    Attributes:
        reading: seconds that the drafter takes for each token of a prompt, which it
            reads before its first draft; 0: not known.
    """

    def __init__(
        self,
        known: Mapping[int, Mapping[int, float]] | None = None,
        *,
        cold: float = 0.0,
    ) -> None:
        self.reading = 0.0
        self._cold = _samples([cold] if cold else [])
        self._samples: dict[int, dict[int, deque[float]]] = {}
        self.take(known or {})

    def table(self) -> CostTable:
        """Return what is known, in seconds."""
        return {
            bucket: {length: median(each) for length, each in sorted(own.items())}
            for bucket, own in sorted(self._samples.items())
            if own
        }

    def take(self, table: Mapping[int, Mapping[int, float]]) -> None:
        """Take over what a table knows, in place of what is known here."""
        for bucket, costs in table.items():
            own = self._samples.setdefault(bucket, {})
            own |= {n: _known(seconds) for n, seconds in costs.items()}

    def note(self, context: int, length: int, seconds: float) -> None:
        """Learn from a round that took `seconds`."""
        self._at(context).setdefault(length, _samples()).append(seconds)

    def note_cold(self, seconds: float) -> None:
        """Learn from a plain step that was not in flight, and submits the next one."""
        self._cold.append(seconds)

    @property
    def cold(self) -> float:
        """The seconds of such a step; 0: not known."""
        return median(self._cold) if self._cold else 0.0

    def note_reading(self, tokens: int, seconds: float) -> None:
        """Learn from a drafter that has read a prompt of so many tokens."""
        self.reading = seconds / max(1, tokens)

    def knows(self, context: int, length: int) -> bool:
        """Whether rounds of a length were measured."""
        return length in self._at(context)

    def longest(self, context: int) -> int:
        """Return the longest measured draft."""
        return max((0, *self._at(context)))

    def plain(self, context: int) -> float | None:
        """Return the seconds of a plain step; None: not known yet."""
        samples = self._at(context).get(0, ())
        return median(samples) if len(samples) >= LEAST_PLAIN else None

    def left(self, context: int) -> float:
        """Return what is left of a plain step in flight when a round begins.

        As a share of it: nearly all where a device computes while the host goes on,
        hardly any on a CPU, where a step is computed while it is submitted, so that the
        first of a run of plain steps takes the time of two.
        """
        plain = self.plain(context)
        if not self.cold or not plain:
            return 1.0
        return min(1.0, max(0.0, 2.0 - self.cold / plain))

    def curve(self, context: int, longest: int) -> list[float]:
        """Return the seconds of rounds with 0 to `longest` drafts.

        The plain step has to be known.
        """
        known = sorted((n, median(each)) for n, each in self._at(context).items())
        start, at_start = known[0]
        found = [at_start]
        for stop, at_stop in known[1:]:
            slope = (at_stop - at_start) / (stop - start)
            found += [at_start + slope * n for n in range(1, stop - start + 1)]
            start, at_start = stop, at_stop
        rise = GUESSED_SHARE * found[0]
        if start:
            rise = max(0.0, (at_start - found[0]) / start / 2)
        found += [at_start + rise * n for n in range(1, longest - start + 1)]
        return found[: longest + 1]

    def _at(self, context: int) -> dict[int, deque[float]]:
        """Return a bucket; a new one begins with what the nearest one knows."""
        bucket = bucket_of(context)
        if bucket not in self._samples:
            nearest = min(self._samples, key=lambda b: (abs(b - bucket), b), default=0)
            costs = self._samples.get(nearest, {})
            known = {length: _known(median(each)) for length, each in costs.items()}
            self._samples[bucket] = known
        return self._samples[bucket]


def _known(seconds: float) -> deque[float]:
    return _samples([seconds] * KNOWN_SAMPLES)


def _samples(seconds: Iterable[float] = ()) -> deque[float]:
    return deque(seconds, maxlen=SAMPLES)
