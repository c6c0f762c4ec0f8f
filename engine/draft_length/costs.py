"""Costs of rounds, by draft length and context length.

The cost of a draft length is the median of its last rounds, so that one slow round has
no effect. Costs between measured lengths are interpolated. Beyond these lengths, costs
are assumed to grow at half the mean slope: a length whose cost is assumed too low is
tried, and its cost corrected. Costs that are not measured again are dropped: a cost
that is too high would end drafting.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import median
from typing import TypeVar

from mlx_speculation.models import row_size

# The median of a length is taken over this many of its last rounds.
SAMPLES = 9
# The cost of a plain step counts as known after this many steps.
LEAST_PLAIN = 2
# The costs of a draft length that was not measured in this many rounds are dropped.
FORGETS = 128
# The cost of a drafted token before any is measured, as a share of a plain step.
GUESSED_SHARE = 0.25
# Contexts up to this length cost about the same; each doubling is one more bucket.
SHORT_CONTEXT = 512

T = TypeVar("T")
CostTable = dict[int, dict[int, float]]


@cache
def few_lengths(longest: int) -> tuple[int, ...]:
    """Return 0, 1, 2, 3, 4, 6, 8, ... up to a length; see `models/shape_buckets.py`."""
    return (0, *(n for n in range(1, longest + 1) if row_size(n) == n))


def bucket_of(context: int) -> int:
    """Return the bucket of a context length: 0 up to 512, 1 up to 1,024, ..."""
    return ((max(1, context) - 1) // SHORT_CONTEXT).bit_length()


class RoundCosts:
    """Seconds of rounds by context bucket and draft length; 0 is a steady plain step.

    Args:
        measured: a `table` that this process measured.
        kept: a `table` of an earlier process, or of a similar batch. Its ratios between
            lengths are used for lengths that are not measured yet.
    """

    def __init__(
        self, measured: CostTable | None = None, kept: CostTable | None = None
    ) -> None:
        # Seconds that the drafter needs to read a prompt token; 0: not known
        self.reading = 0.0
        self.kept = dict(kept or {})
        # The last rounds of each bucket and length, and the medians of all buckets
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._medians: CostTable = {}
        self._rounds = 0
        self._recent: set[tuple[int, int]] = set()  # measured since the last dropping
        self.take(measured or {})

    def table(self) -> CostTable:
        """Return the known costs of each bucket, in seconds."""
        known = {
            bucket: dict(sorted(each.items()))
            for bucket, each in self._medians.items()
            if 0 in each
        }
        return dict(sorted({**self.kept, **known}.items()))

    def take(self, table: CostTable) -> None:
        """Take over the costs of a calibration."""
        for bucket, costs in table.items():
            self._medians.setdefault(bucket, {}).update(costs)
            for length, seconds in costs.items():
                samples = deque([seconds] * LEAST_PLAIN, SAMPLES)
                self._samples[bucket, length] = samples

    def note(self, context: int, length: int, seconds: float) -> None:
        """Learn from a round that took `seconds`."""
        key = bucket, _ = bucket_of(context), length
        samples = self._samples.setdefault(key, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._medians.setdefault(bucket, {})[length] = median(samples)
        self._rounds += 1
        self._recent.add(key)
        if self._rounds % FORGETS == 0:
            for bucket, length in self._samples.keys() - self._recent:
                if length:
                    del self._samples[bucket, length], self._medians[bucket][length]
            self.kept, self._recent = {}, set()

    def longest(self) -> int:
        """Return the longest measured draft."""
        return max((length for _, length in self._samples), default=0)

    def plain(self, context: int) -> float | None:
        """Return the seconds of a plain step in the nearest bucket, if any is known."""
        known = {
            bucket: self._medians[bucket][0]
            for (bucket, length), samples in self._samples.items()
            if not length and len(samples) >= LEAST_PLAIN
        }
        return _nearest(known, bucket_of(context))

    def curve(self, context: int, longest: int, plain: float) -> list[float]:
        """Return the seconds of rounds with 0 to `longest` drafted tokens.

        `plain` is used if no plain step of this bucket was measured. Beyond the longest
        measured draft, costs grow like the kept ones, or like the nearest bucket's.
        """
        bucket = bucket_of(context)
        medians, shape = self._medians.get(bucket, {}), self.kept.get(bucket)
        if len(medians) < 2 and shape is None:
            drafted = {b: each for b, each in self.table().items() if len(each) > 1}
            shape = _nearest(drafted, bucket)
        known = sorted({0: plain, **medians}.items())
        last, at_last = known[-1]
        if shape and max(shape) > last:
            line = _line(sorted(shape.items()), longest)
            known += [
                (n, at_last * line[n] / line[last])
                for n in range(last + 1, longest + 1)
            ]
        return _line(known, longest)


def _nearest(known: Mapping[int, T], bucket: int) -> T | None:
    """Return the value of the nearest bucket; None: there is none."""
    nearest = min(known, key=lambda b: (abs(b - bucket), b), default=None)
    return None if nearest is None else known[nearest]


def _line(known: Sequence[tuple[int, float]], longest: int) -> list[float]:
    """Return the seconds of 0 to `longest` drafted tokens, given some of them."""
    result: list[float] = []
    for (start, low), (stop, high) in pairwise(known):
        slope = (high - low) / (stop - start)
        result += [low + slope * n for n in range(stop - start)]
    last, at_last = known[-1]
    rise = GUESSED_SHARE * at_last
    if last:
        rise = max(0.0, (at_last - known[0][1]) / last / 2)
    result += [at_last + rise * n for n in range(longest - last + 1)]
    return result[: longest + 1]
