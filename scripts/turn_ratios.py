"""Speeds of arms that took turns, compared so finely as their slices allow.

Of several named lengths the fastest is in part the luckiest: to be compared with it is
to be compared with its luck too. So the best length is chosen by one half of the slices
and its speed taken from the other half, for many random halves:

    slices           1    2    3    4    5    6
    one half         x         x    x              k = 8 is the fastest here,
    the other             x              x    x    and is compared with here

How far a ratio can be trusted is told by drawing slices anew, with replacement.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SPLITS = 200
DRAWS = 1000
INTERVAL = (2.5, 97.5)  # percentiles

# Of each arm: timed tokens and seconds, slice by slice.
Slices = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class OverBest:
    """A speed over that of the best of some others.

    Attributes:
        ratio: of speeds, the best one chosen by other slices than it is compared in.
        low: where 95 of 100 draws of slices lie, over the best one of most halves.
        high: likewise.
        best: that one's name.
    """

    ratio: float
    low: float
    high: float
    best: str


def over_best(own: Slices, others: Mapping[str, Slices], seed: int = 0) -> OverBest:
    """Compare an arm with the best of others, which took turns with it.

    Args:
        own: the arm's slices.
        others: by name, at least one; as many slices of each.
        seed: of the halves and the draws.
    """
    random = np.random.default_rng(seed)
    names = list(others)
    arms = np.array([own, *others.values()], dtype=float)  # [arms, slices, 2]
    count = arms.shape[1]
    ratios, chosen = [], Counter[str]()
    for _ in range(SPLITS):
        order = random.permutation(count)
        halves = order[: count // 2], order[count // 2 :]
        for one, other in (halves, halves[::-1]):
            best = int(_speeds(arms[1:, one]).argmax())
            chosen[names[best]] += 1
            speeds = _speeds(arms[:, other])
            ratios.append(speeds[0] / speeds[1 + best])
    ((best_name, _),) = chosen.most_common(1)
    pair = arms[[0, 1 + names.index(best_name)]]
    drawn = [_speeds(pair[:, random.integers(count, size=count)]) for _ in range(DRAWS)]
    low, high = np.percentile([mine / best for mine, best in drawn], INTERVAL)
    return OverBest(float(np.mean(ratios)), float(low), float(high), best_name)


def _speeds(arms: np.ndarray) -> np.ndarray:
    """Return tokens per second of arms [n, slices, 2]."""
    tokens, seconds = arms.sum(axis=1).T
    return np.asarray(tokens / seconds)
