"""What a round costs, by the number of drafted tokens and the length of the context.

Costs are medians of the last rounds of a length, so that one slow round decides
nothing. Lengths between measured ones are on straight lines, those beyond go on at half
the slope: a guess that errs to the cheap side is tried, and corrected.
"""

from collections import deque
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from statistics import median

from mlx_speculation.models import row_size

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


@cache
def few_lengths(longest: int) -> tuple[int, ...]:
    """Return 0, 1, 2, 3, 4, 6, 8, ... up to a length; see `models/shape_buckets.py`."""
    return (0, *(n for n in range(1, longest + 1) if row_size(n) == n))


def left_of_step(plain: float, cold: float) -> float:
    """Return the seconds that are left of a step in flight when a round begins.

    Nearly all where a device computes while the host goes on; hardly any on a CPU,
    where a step is computed while it is submitted, so that the first of a run of plain
    steps takes the time of two.

    Args:
        plain: seconds of a plain step.
        cold: seconds of a step that was not in flight, and submits one; 0: not known.
    """
    return min(plain, max(0.0, 2 * plain - cold)) if cold else plain


def bucket_of(context: int) -> int:
    """Return the bucket of a number of tokens: 0 up to 512, 1 up to 1,024, ..."""
    return ((max(1, context) - 1) // SHORT_CONTEXT).bit_length()


class RoundCosts:
    """Seconds of rounds by context bucket and draft length; 0 is a steady plain step.

    Args:
        known: what `table` of earlier rounds has returned.
    """

    def __init__(self, known: Mapping[int, Mapping[int, float]] | None = None) -> None:
        # Seconds that the drafter takes for each token of a prompt, which it reads
        # before its first draft; 0: not known
        self.reading = 0.0
        self.news = False  # whether a length was measured since this was set to False
        self._samples: dict[int, dict[int, deque[float]]] = {}
        self._medians: CostTable = {}  # of the samples, kept with them
        self.take(known or {})

    def table(self) -> CostTable:
        """Return the medians, in seconds."""
        return {
            bucket: dict(sorted(own.items()))
            for bucket, own in sorted(self._medians.items())
            if own
        }

    def take(self, table: Mapping[int, Mapping[int, float]]) -> None:
        """Take over what a table knows, in place of what is known here."""
        self.news = True
        for bucket, costs in table.items():
            self._samples.setdefault(bucket, {}).update(
                (length, deque([seconds] * KNOWN_SAMPLES, SAMPLES))
                for length, seconds in costs.items()
            )
            self._medians.setdefault(bucket, {}).update(costs)

    def note(self, context: int, length: int, seconds: float) -> None:
        """Learn from a round that took `seconds`."""
        samples = self._at(context)
        self.news |= length not in samples
        own = samples.setdefault(length, deque(maxlen=SAMPLES))
        own.append(seconds)
        self._medians[bucket_of(context)][length] = median(own)

    def knows(self, context: int, length: int) -> bool:
        """Whether rounds of a length were measured."""
        return length in self._at(context)

    def longest(self, context: int) -> int:
        """Return the longest measured draft."""
        return max((0, *self._at(context)))

    def plain(self, context: int) -> float | None:
        """Return the seconds of a plain step; None: not known yet."""
        samples = self._at(context).get(0, ())
        known = len(samples) >= LEAST_PLAIN
        return self._medians[bucket_of(context)][0] if known else None

    def curve(self, context: int, longest: int, plain: float) -> list[float]:
        """Return the seconds of rounds with 0 to `longest` drafts.

        `plain` are those of a plain step where none is known here.
        """
        self._at(context)
        known = sorted({0: plain, **self._medians[bucket_of(context)]}.items())
        found: list[float] = []
        for (start, low), (stop, high) in pairwise(known):
            slope = (high - low) / (stop - start)
            found += [low + slope * n for n in range(stop - start)]
        last, at_last = known[-1]
        rise = GUESSED_SHARE * at_last
        if last:
            rise = max(0.0, (at_last - found[0]) / last / 2)
        found += [at_last + rise * n for n in range(longest - last + 1)]
        return found[: longest + 1]

    def _at(self, context: int) -> dict[int, deque[float]]:
        """Return a bucket; a new one begins with what the nearest one knows."""
        bucket = bucket_of(context)
        if bucket not in self._samples:
            nearest = min(self._samples, key=lambda b: (abs(b - bucket), b), default=0)
            self.take({bucket: self.table().get(nearest, {})})
        return self._samples[bucket]
