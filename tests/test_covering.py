"""Combinations of `covering` without the mark `slow`.

They contain each value of each parameter, and each pair of values of the parameters
that `pairs` names.
"""

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.covering import covering


def quick(parameters: list[Any]) -> list[tuple[Any, ...]]:
    return [each.values for each in parameters if not each.marks]


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(sizes=SIZES)
def test_each_combination_is_there_once_and_each_value_is_quick(
    sizes: list[int],
) -> None:
    values = [range(size) for size in sizes]
    parameters = covering(*values)
    assert [each.values for each in parameters] == list(product(*values))
    marks = [mark.name for each in parameters for mark in each.marks]
    assert set(marks) <= {"slow"}
    quick_rows = quick(parameters)
    for number, each in enumerate(values):
        assert {one[number] for one in quick_rows} == set(each)
    assert len(quick_rows) == max(sizes)


@given(sizes=SIZES, data=st.data())
def test_pairs_that_are_named_all_meet(sizes: list[int], data: st.DataObject) -> None:
    numbers = st.integers(0, len(sizes) - 1)
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), max_size=3))
    values = [range(size) for size in sizes]
    quick_rows = quick(covering(*values, pairs=pairs))
    for one, two in pairs:
        met = {(each[one], each[two]) for each in quick_rows}
        assert met == {(each[one], each[two]) for each in product(*values)}, (
            f"{one} and {two}"
        )


def test_what_is_left_over_is_mixed_and_always_the_same() -> None:
    drawn = [quick(covering("abcdef", (1, 2, 3))) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert sorted(value for _, value in drawn[0]) == [1, 1, 2, 2, 3, 3]


def test_the_example_of_its_docstring() -> None:
    assert quick(covering("abc", (1, 2, 3, 4))) == [
        ("a", 1),
        ("a", 4),
        ("b", 2),
        ("c", 3),
    ]


def test_values_may_be_equal_or_without_a_hash() -> None:
    parameters = covering([[1], [1]], [{}, {"a": 1}])
    assert len(parameters) == 4
    assert len(quick(parameters)) == 2
    assert pytest.param([1], {}) in parameters


def test_values_that_are_always_slow_are_named() -> None:
    parameters = covering("abc", (1, 2, 3, 4), quick=(0, "ac"))
    assert len(parameters) == 12
    assert quick(parameters) == [("a", 1), ("a", 4), ("c", 3)]
    with pytest.raises(AssertionError, match="not among the values"):
        covering("abc", (1, 2), quick=(0, "d"))
