"""Of all combinations of parameters, those that `make test` runs.

A product of parameters grows with each of them, and most faults are found by one value
or by two that meet. So the quick combinations have every value of each parameter, and
every two values of the parameters that are named as pairs; the others are marked slow,
and `make test-long` runs them too.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest

# What has to occur: each parameter that it is of, by its number, and the value's.
Need = frozenset[tuple[int, int]]


def covering(
    *values: Collection[Any],
    pairs: Collection[tuple[int, int]] = (),
    quick: tuple[int, Collection[Any]] | None = None,
) -> list[Any]:
    """Return every combination, for pytest's parametrize; a few of them are quick.

    `covering("abc", (1, 2, 3, 4))` has twelve, four of them quick: a1, b2, c3 and a4.

    Args:
        values: of each parameter.
        pairs: the numbers of two parameters whose values shall all meet.
        quick: the number of a parameter, and those of its values that are not slow in
            all combinations.
    """
    lists = [list(each) for each in values]
    places = list(product(*(range(len(each)) for each in lists)))
    chosen_places = _covering_places(places, pairs)
    if quick is not None:
        number, some = quick
        assert set(some) <= set(lists[number]), "no values of the parameter"
        chosen_places = {
            each for each in chosen_places if lists[number][each[number]] in some
        }
    return [
        pytest.param(
            *(each[place] for each, place in zip(lists, chosen, strict=True)),
            marks=() if chosen in chosen_places else pytest.mark.slow,
        )
        for chosen in places
    ]


def others_slow(values: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Return the values of one parameter, for pytest's parametrize; some are quick."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]


def _covering_places(
    places: list[tuple[int, ...]], pairs: Collection[tuple[int, int]]
) -> set[tuple[int, ...]]:
    """Return combinations that meet all needs: always one that meets the most.

    Among these it is one whose values have been used the least, so that they are mixed,
    and the first of those, so that each run has the same.
    """
    met_by = {each: _needs(each, pairs) for each in places}
    left = set[Need]().union(*met_by.values())
    used: Counter[tuple[int, int]] = Counter()
    quick = set[tuple[int, ...]]()
    while left:
        best = max(
            places,
            key=lambda each: (
                len(met_by[each] & left),
                -sum(used[value] for value in enumerate(each)),
            ),
        )
        quick.add(best)
        left -= met_by[best]
        used.update(enumerate(best))
    return quick


def _needs(
    chosen: tuple[int, ...], pairs: Collection[tuple[int, int]]
) -> frozenset[Need]:
    """Return what one combination meets."""
    values = list(enumerate(chosen))
    alone = [frozenset({value}) for value in values]
    return frozenset(
        [*alone, *(frozenset({values[one], values[two]}) for one, two in pairs)]
    )
