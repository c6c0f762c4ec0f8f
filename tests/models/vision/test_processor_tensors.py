"""Outputs of a processor become mlx arrays; ragged lists stay lists."""

import mlx.core as mx
import numpy as np

from mlx_speculation.models.vision.load import _array


def test_lists_of_arrays_stay_lists_however_deep() -> None:
    parts = [np.zeros((3, 4)), np.zeros((3, 8))]
    assert [each.shape for each in _array(parts)] == [(3, 4), (3, 8)]
    ((first, second),) = _array([parts])  # parts of each image
    assert (first.shape, second.shape) == ((3, 4), (3, 8))
    assert isinstance(first, mx.array)


def test_numbers_become_one_array_and_text_is_left_out() -> None:
    assert _array([[4, 6]]).shape == (1, 2)
    assert _array(None) is None
    assert _array("a format") is None
    assert _array(["a format"]) is None
    given = mx.zeros((1, 2))
    assert _array(given) is given
