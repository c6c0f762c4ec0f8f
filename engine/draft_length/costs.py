"""Costs of rounds, by draft length and context length, and the sources they belong to.

The cost of a draft length is the median time of its last rounds. Beyond all known
lengths, costs are assumed to grow at half the mean slope: a length whose cost is
assumed too low is tried, and its cost corrected. Costs not measured again are dropped,
since drafting would not resume after too high a cost. Only calibrated times are stored:
a stream may run on a busy machine.
"""

import os
import platform
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import mlx.core as mx

from mlx_speculation.blas import blas_in_use
from mlx_speculation.engine.lookup.survival import AcceptanceRates
from mlx_speculation.engine.timing import RoundSeconds
from mlx_speculation.measured_file import MeasuredFile
from mlx_speculation.models import PART_SIZES, row_size

SAMPLES = 9  # the median of a length is taken over this many of its last rounds
LEAST_PLAIN = 2  # the cost of a plain step counts as known after this many steps
FORGETS = 128  # costs of a length that was not measured in so many rounds are dropped
GUESSED_SHARE = 0.25  # a drafted token's assumed cost, in plain steps, until measured
SHORT_CONTEXT = 512  # contexts up to it cost the same; each doubling is one more bucket
_VERSION = 8  # of the files

T = TypeVar("T")
# Seconds by context bucket and draft length: of rounds, and of the parts of rounds.
CostTable = dict[int, dict[int, float]]
PartsTable = dict[int, dict[int, RoundSeconds]]


@cache
def few_lengths(longest: int) -> tuple[int, ...]:
    """Return 0, 1, 2, 3, 4, 6, 8, ... up to a length; see `models/shape_buckets.py`."""
    return (0, *(n for n in range(1, longest + 1) if row_size(n) == n))


def bucket_of(context: int) -> int:
    """Return the bucket of a context length: 0 up to 512, 1 up to 1,024, ..."""
    return ((max(1, context) - 1) // SHORT_CONTEXT).bit_length()


class RoundCosts:
    """Seconds of rounds by bucket and draft length; length 0 is a plain step."""

    def __init__(
        self, measured: CostTable | None = None, kept: CostTable | None = None
    ) -> None:
        self.reading = 0.0  # seconds of reading a prompt token; 0: not known
        self.kept = dict(kept or {})  # of an earlier process, or another batch size
        # Tables by bucket and length. Threads share them, so loops run over copies
        self._samples: dict[tuple[int, int], deque[float]] = {}  # of the last rounds
        self._medians: CostTable = {}  # of these rounds
        self._rounds = 0
        self._recent: set[tuple[int, int]] = set()  # measured since the last drop
        self.take(measured or {})

    def table(self) -> CostTable:
        """Return the known costs of each bucket, in seconds."""
        known = {
            bucket: dict(sorted(each.items()))
            for bucket, each in [*self._medians.items()]
            if 0 in each
        }
        return dict(sorted({**self.kept, **known}.items()))

    def take(self, table: CostTable) -> None:
        """Take over the costs of a calibration."""
        for bucket, costs in table.items():
            self._medians.setdefault(bucket, {}).update(costs)
            for length, seconds in costs.items():
                self._samples[bucket, length] = deque([seconds] * LEAST_PLAIN, SAMPLES)

    def note(self, context: int, length: int, seconds: float) -> None:
        """Learn from a round that took `seconds`."""
        key = bucket, _ = bucket_of(context), length
        samples = self._samples.setdefault(key, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._medians.setdefault(bucket, {})[length] = median(samples)
        self._rounds += 1
        self._recent.add(key)
        if self._rounds % FORGETS == 0:
            for bucket, n in [k for k in self._samples.keys() - self._recent if k[1]]:
                self._samples.pop((bucket, n), None)
                self._medians[bucket].pop(n, None)
            self.kept, self._recent = {}, set()

    def longest(self) -> int:
        """Return the longest measured draft length; 0: no draft was measured."""
        return max({0}.union(*self._medians.values()))

    def plain(self, context: int) -> float | None:
        """Return the seconds of a plain step in the nearest bucket, if any is known."""
        known = {
            bucket: each[0]
            for bucket, each in [*self._medians.items()]
            if len(self._samples.get((bucket, 0), ())) >= LEAST_PLAIN
        }
        return _nearest(known, bucket_of(context))

    def curve(self, context: int, longest: int, plain: float) -> list[float]:
        """Return the seconds of rounds with 0 to `longest` drafted tokens.

        Beyond the longest measured draft, costs grow in proportion to the bucket's kept
        ones. If it has none, and at most one measured length, the nearest bucket's
        costs replace them. A plain step that was not measured takes `plain` seconds.
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


@dataclass(slots=True, eq=False)
class Source:
    """A source of drafts for one target: costs of its rounds, and its acceptance."""

    costs: RoundCosts = field(default_factory=RoundCosts)
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)  # by position
    free: bool = False  # its proposals cost nothing, and come before others
    name: str = "draft"  # the kind of its drafts
    measured: PartsTable = field(default_factory=dict)  # times of calibrated rounds
    part: int | None = None  # layers that a forward submits at once; None: not measured
    file: MeasuredFile | None = None  # of `measured` and `part`; None: not stored

    @classmethod
    def read(
        cls, key: dict[str, Any] | None, *, free: bool = False, name: str = "draft"
    ) -> "Source":
        """Return a source with the costs stored under `key`; None: none are stored."""
        key = key and {"machine": machine(), **key}
        lost = "The cost of rounds is measured again."
        file = MeasuredFile("costs", _VERSION, key, lost)
        measured, part = file.read(_parsed) or ({}, None)
        costs = RoundCosts(kept=_totals(measured))
        return cls(costs, free=free, name=name, measured=measured, part=part, file=file)

    def take(self, measured: PartsTable) -> CostTable:
        """Learn from a calibration, and write the file; return all known costs."""
        self.costs.take(_totals(measured))
        self.measured |= measured
        if self.file is not None:
            self.file.write({"parts": self.measured, "part": self.part})
        return self.costs.table()


def machine() -> dict[str, Any]:
    """Return the properties of this machine that its speed depends on."""
    return {
        "mlx": version("mlx"),
        "device": str(mx.default_device()),
        "name": mx.device_info().get("device_name", ""),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "blas": blas_in_use() if mx.default_device() == mx.cpu else "",
    }


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


def _totals(measured: PartsTable) -> CostTable:
    """Return the seconds of whole rounds."""
    return {
        bucket: {length: one.total for length, one in each.items()}
        for bucket, each in measured.items()
    }


def _parsed(fields: Any) -> tuple[PartsTable, int | None]:
    """Return the `parts` and `part` of a file; raise ValueError if out of range."""
    measured = {
        int(bucket): {int(n): RoundSeconds._make(one) for n, one in each.items()}
        for bucket, each in fields["parts"].items()
    }
    rounds = [one for each in measured.values() for one in each.values()]
    if not all(min(one) >= 0 and max(one) < 1e9 and one.total > 0 for one in rounds):
        raise ValueError("the seconds of a round are not positive numbers")
    if any(each and min(each) != 0 for each in measured.values()):
        raise ValueError("the cost of a plain step is missing")
    if fields["part"] not in (None, *PART_SIZES):
        raise ValueError(f"part is {fields['part']}, not one of {PART_SIZES}")
    return measured, fields["part"]
