"""Rotary positions with shared tables are mlx's own, bit for bit on a CPU."""

from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation.models.cpu.norm_rope import rope
from mlx_speculation.models.round_context import rows_of_a_round

ON_CPU = mx.default_device().type == mx.DeviceType.cpu


def _same(actual: mx.array, wanted: mx.array) -> None:
    assert actual.shape == wanted.shape
    assert actual.dtype == wanted.dtype
    if ON_CPU:
        assert mx.array_equal(actual, wanted)
    else:  # kernels of a GPU round in another order
        np.testing.assert_allclose(
            actual.astype(mx.float32), wanted.astype(mx.float32), rtol=1e-4, atol=1e-4
        )


def in_round(x: mx.array, tokens: int, *args: Any, **how: Any) -> mx.array:
    """Rotate rows in a forward of `tokens` tokens; rotations of few are compiled."""
    with rows_of_a_round(tokens):
        return rope(x, *args, **how)


FREQS = [mx.arange(1, 5).astype(mx.float32), mx.arange(3, 7).astype(mx.float32)]

ways = st.fixed_dictionaries(
    {
        "dims": st.sampled_from([2, 4, 6, 8]),
        "traditional": st.booleans(),
        "base": st.sampled_from([10_000.0, 1e6]),
        "scale": st.sampled_from([1.0, 0.25]),
        "width": st.sampled_from([8, 11]),
        "offset": st.integers(0, 3000) | st.sampled_from([mx.array(7)]),
    }
)


@given(
    calls=st.lists(ways, min_size=1, max_size=6),
    rows=st.integers(1, 5),
    tokens=st.sampled_from([1, 64, 65]),
    half=st.booleans(),
    freqs=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_rope_is_mlxs(
    calls: list[dict[str, Any]],
    rows: int,
    tokens: int,
    half: bool,
    freqs: int,
    seed: int,
) -> None:
    x = mx.random.normal((1, rows, 3, 11), key=mx.random.key(seed))
    x = x.transpose(0, 2, 1, 3).astype(mx.bfloat16 if half else mx.float32)
    for call in calls:
        how = dict(call)
        part = x[..., : how.pop("width")]
        if freqs:
            how |= {"freqs": FREQS[freqs - 1], "base": None, "dims": 8}
        _same(in_round(part, tokens, **how), mx.fast.rope(part, **how))


def test_layers_with_other_frequencies_have_tables_of_their_own() -> None:
    x = mx.random.normal((1, 2, 3, 8), key=mx.random.key(1))
    how: dict[str, Any] = {"traditional": False, "base": None, "scale": 1.0}
    for freqs in (*FREQS, *FREQS):
        rotated = in_round(x, 2, 8, **how, offset=5, freqs=freqs)
        _same(rotated, mx.fast.rope(x, 8, **how, offset=5, freqs=freqs))
