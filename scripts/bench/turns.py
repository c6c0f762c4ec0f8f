"""Runs arms, the variants to compare, in turns; takes ratios of their times.

The speed of a shared machine drifts: successive runs differ by more than the arms do.
So all arms run in each turn, in changing order, and ratios are taken within a turn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

Clock = Callable[[], float]  # in seconds
T = TypeVar("T")
Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of some values."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        lower, _, upper = quantiles(values, n=4, method="inclusive")
        return cls(median(values), lower, upper)

    @classmethod
    def over(cls, ours: Sequence[float], base: Sequence[float]) -> "Spread":
        """Summarise the ratios of `ours` to `base`, pair by pair."""
        return cls.of([one / other for one, other in zip(ours, base, strict=True)])


def order(items: Sequence[T], number: int) -> list[T]:
    """Return the order of a turn: rotated by its number, reversed in odd turns."""
    first = number % len(items) if items else 0
    turned = [*items[first:], *items[:first]]
    return turned[::-1] if number % 2 else turned


def in_turns(
    acts: Mapping[Name, Callable[[int], T]], repeats: int, *, warm_up: int = 1
) -> dict[Name, list[T]]:
    """Run each arm in each turn; return the results of each arm by turn.

    Arms are called with the number of the turn. The first `warm_up` turns get 0, and
    their results are dropped.
    """
    result: dict[Name, list[T]] = {name: [] for name in acts}
    for number in range(-warm_up, repeats):
        for name in order([*acts], number):
            given = acts[name](max(0, number))
            if number >= 0:
                result[name].append(given)
    return result
