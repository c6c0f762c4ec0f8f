"""Costs of rounds, by drafted tokens and length of the context.

Costs are medians of the last rounds of a length, so that one slow round decides
nothing. Lengths between measured ones are on straight lines, those beyond go on at half
the slope: a guess that errs to the cheap side is tried, and corrected. Costs that are
not measured again are forgotten, or one that errs to the dear side could end drafts.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import median
from typing import TypeVar

from mlx_speculation.models import row_size

# Rounds that a median is of.
SAMPLES = 9
# A plain step is known after so many: drafts are judged by it.
LEAST_PLAIN = 2
# Rounds after which what was not measured in as many is forgotten, but for plain steps.
FORGETS = 128
# Of an unknown machine a drafted token is taken for so much of a plain step.
GUESSED_SHARE = 0.25
# Contexts up to here cost about the same; beyond it every doubling is a bucket.
SHORT_CONTEXT = 512

T = TypeVar("T")
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
        measured: what `table` of rounds of this process has returned.
        kept: the same of earlier processes, or of rounds like these. Their ratios are
            taken for what was not measured yet.
    """

    def __init__(
        self, measured: CostTable | None = None, kept: CostTable | None = None
    ) -> None:
        # Seconds that the drafter takes for each token of a prompt, which it reads
        # before its first draft; 0: not known
        self.reading = 0.0
        self.kept = dict(kept or {})
        self._samples: dict[int, dict[int, deque[float]]] = {}
        self._medians: CostTable = {}  # of the samples, kept with them
        self._rounds = 0
        self._recent: set[tuple[int, int]] = set()  # measured since others were dropped
        self.take(measured or {})

    def table(self) -> CostTable:
        """Return what is known of each bucket, in seconds."""
        measured = {
            bucket: dict(sorted(each.items()))
            for bucket, each in self._medians.items()
            if 0 in each
        }
        return dict(sorted({**self.kept, **measured}.items()))

    def take(self, table: CostTable) -> None:
        """Take over what was measured just now."""
        for bucket, costs in table.items():
            self._medians.setdefault(bucket, {}).update(costs)
            self._samples.setdefault(bucket, {}).update(
                (length, deque([seconds] * LEAST_PLAIN, SAMPLES))
                for length, seconds in costs.items()
            )

    def note(self, context: int, length: int, seconds: float) -> None:
        """Learn from a round that took `seconds`."""
        bucket = bucket_of(context)
        samples = self._samples.setdefault(bucket, {})
        samples.setdefault(length, deque(maxlen=SAMPLES)).append(seconds)
        self._medians.setdefault(bucket, {})[length] = median(samples[length])
        self._rounds += 1
        self._recent.add((bucket, length))
        if self._rounds % FORGETS == 0:
            for bucket, samples in self._samples.items():
                for length in [*samples]:
                    if length and (bucket, length) not in self._recent:
                        del samples[length], self._medians[bucket][length]
            self.kept, self._recent = {}, set()

    def knows(self, context: int, length: int) -> bool:
        """Return whether rounds of a length were measured."""
        return length in self._medians.get(bucket_of(context), ())

    def longest(self) -> int:
        """Return the longest measured draft."""
        return max((max(each, default=0) for each in self._medians.values()), default=0)

    def plain(self, context: int) -> float | None:
        """Return the seconds of a plain step in the nearest bucket, if any is known."""
        known = {
            bucket: self._medians[bucket][0]
            for bucket, each in self._samples.items()
            if len(each.get(0, ())) >= LEAST_PLAIN
        }
        return _nearest(known, bucket_of(context))

    def curve(self, context: int, longest: int, plain: float) -> list[float]:
        """Return the seconds of rounds with 0 to `longest` drafts.

        `plain` are those of a plain step where none is known. Beyond the longest
        measured draft costs go on as the kept ones do, or those of the nearest bucket.
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
    """Return what is known of the nearest bucket."""
    nearest = min(known, key=lambda b: (abs(b - bucket), b), default=None)
    return None if nearest is None else known[nearest]


def _line(known: Sequence[tuple[int, float]], longest: int) -> list[float]:
    """Return seconds of 0 to `longest` drafts, given those of some."""
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
