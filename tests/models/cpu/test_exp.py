"""Exponentials in float32 are close to those in float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_speculation.models.cpu.exp import exponentials

Array = NDArray[np.float64]
# The exponent is a difference of up to 88, with a rounding error of up to 88 / 2^24.
RELATIVE = 1e-5
SMALLEST = 2.0**-125

floats = st.floats(-1e4, 1e4, width=32)


def float64(array: mx.array) -> Array:
    return np.array(array).astype(np.float64)


@given(st.lists(floats, min_size=1, max_size=40))
def test_exponentials_are_those_of_the_distance_to_the_largest(
    row: list[float],
) -> None:
    scores = np.array(row, np.float32).astype(np.float64)
    wanted = np.exp(scores - scores.max())
    actual = float64(exponentials(mx.array(row, mx.float32)))
    # The rounding error of the difference grows with the scores.
    loose = RELATIVE + np.abs(scores).max() * 2.0**-24
    np.testing.assert_allclose(actual, wanted, rtol=loose, atol=SMALLEST)


@given(st.floats(-87.0, 0.0, width=32))
def test_one_exponential_is_right_to_rounding(x: float) -> None:
    actual = float64(exponentials(mx.array([x, 0.0], mx.float32)))[0]
    assert actual == pytest.approx(np.exp(float(x)), rel=6e-6, abs=0)


def test_what_is_far_below_is_nothing_and_the_largest_is_one() -> None:
    actual = exponentials(mx.array([3.0, 3.0 - 90.0, -1e30, -float("inf")]))
    assert actual.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_so(bad: float) -> None:
    rows = mx.array([[1.0, bad, 2.0], [1.0, 2.0, 3.0]])
    total = exponentials(rows).sum(axis=-1)
    assert mx.isnan(total).tolist() == [True, False]


def test_rows_do_not_meet() -> None:
    scores = mx.random.normal((2, 3, 5, 7), key=mx.random.key(3)) * 9
    every = exponentials(scores)
    for place in np.ndindex(2, 3, 5):
        assert mx.array_equal(every[place], exponentials(scores[place]))
