"""Selects the combinations of parameters that `make test` runs; the others are slow.

Most faults show with one value of one parameter, or with a pair of values of two
parameters. So the quick combinations contain every value of each parameter. For named
pairs of parameters they also contain every pair of values.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest

# Indices (parameter, value) of a value that must occur, or of two that must meet.
Need = frozenset[tuple[int, int]]


def covering(
    *values: Collection[Any],
    pairs: Collection[tuple[int, int]] = (),
    quick: tuple[int, Collection[Any]] | None = None,
) -> list[Any]:
    """Return every combination, for pytest's parametrize; a few of them are quick.

    `covering("abc", (1, 2, 3, 4))` returns 12 combinations. Quick: a1, b2, c3 and a4.

    Args:
        values: the values of each parameter.
        pairs: pairs of parameters, by index; every pair of their values is quick.
        quick: the index of a parameter, and some of its values. Combinations with
            another value of this parameter are slow.
    """
    lists = [list(each) for each in values]
    places = list(product(*(range(len(each)) for each in lists)))
    chosen_places = _covering_places(places, pairs)
    if quick is not None:
        number, some = quick
        assert set(some) <= set(lists[number]), "a quick value is not among the values"
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


def others_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return one parameter's values for parametrize; all but the `quick` are slow."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]


def _covering_places(
    places: list[tuple[int, ...]], pairs: Collection[tuple[int, int]]
) -> set[tuple[int, ...]]:
    """Return combinations that meet all needs, chosen greedily.

    Each choice meets the largest number of needs not met yet. Of equally
    good combinations, the one whose values were used the least is chosen.
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
    values = list(enumerate(chosen))
    alone = [frozenset({value}) for value in values]
    return frozenset(
        [*alone, *(frozenset({values[one], values[two]}) for one, two in pairs)]
    )
