"""Weights packed as NVFP4, compared with a table of the format's values."""

import mlx.core as mx
import numpy as np

from mlx_speculation.models.checkpoints.nvfp4 import unpacked

VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def test_numbers_are_those_of_the_format() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (3, 32))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    scales = np.array([[1.0, 0.5], [2.0, 448.0], [0.25, 1.5]], np.float32)
    whole = 0.125
    weights = {
        "a.weight": mx.array(packed),
        "a.weight_scale": mx.to_fp8(mx.array(scales)),
        "a.weight_scale_2": mx.array(whole),
        "a.input_scale": mx.array(3.0),
        "b.weight": mx.ones((2, 2)),
    }
    values = unpacked(weights)
    assert values.keys() == {"a.weight", "b.weight"}
    signs = np.where(codes >= 8, -1.0, 1.0)
    numbers = np.take(VALUES, codes % 8) * signs
    expected = numbers * np.repeat(scales, 16, axis=1) * whole
    assert values["a.weight"].dtype == mx.bfloat16
    np.testing.assert_array_equal(
        np.array(values["a.weight"].astype(mx.float32)), expected
    )
    values = unpacked({**weights, "norm.weight": mx.ones(2)})
    assert values["a.weight"].dtype == mx.float32


def test_weights_that_are_not_packed_stay() -> None:
    weights = {"a.weight": mx.ones((2, 2)), "a.weight_scale": mx.ones((2,))}
    assert unpacked(weights) is weights
