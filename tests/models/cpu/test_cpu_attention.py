"""Attention by matrix products equals mlx's own, over shapes and masks."""

from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_speculation.models.cpu.attention import attention


def heads(shape: tuple[int, ...], seed: int) -> mx.array:
    """Return an array that is not contiguous, as attention gets it in a model."""
    batch, count, rows, dim = shape
    made = mx.random.normal((batch, rows, count, dim), key=mx.random.key(seed))
    return made.transpose(0, 2, 1, 3)


@given(
    batch=st.integers(1, 3),
    shared=st.integers(1, 3),
    ratio=st.integers(1, 3),
    rows=st.integers(2, 9) | st.sampled_from([64, 65, 131]),
    before=st.integers(0, 40),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kind=st.sampled_from(
        ["none", "causal", "bool", "bool by batch", "bool by head", "one row", "added"]
    ),
    seed=st.integers(0, 2**31),
)
@example(1, 2, 2, 131, 7, (8, 8), "causal", 1)
@example(1, 2, 2, 131, 7, (8, 8), "bool", 2)
@example(1, 2, 2, 131, 7, (8, 8), "one row", 3)
def test_it_does_what_mlx_does(
    batch: int,
    shared: int,
    ratio: int,
    rows: int,
    before: int,
    dims: tuple[int, int],
    kind: str,
    seed: int,
) -> None:
    count = before + rows
    queries = heads((batch, shared * ratio, rows, dims[0]), seed)
    keys = heads((batch, shared, count + 3, dims[0]), seed + 1)[..., :count, :]
    values = heads((batch, shared, count + 3, dims[1]), seed + 2)[..., :count, :]
    first = {"bool by batch": (batch, 1), "bool by head": (batch, shared * ratio)}
    shape = (*first.get(kind, ()), 1 if kind == "one row" else rows, count)
    mask: Any = {"none": None, "causal": "causal"}.get(kind)
    if kind.startswith(("bool", "one")):
        mask = mx.random.bernoulli(0.6, shape, key=mx.random.key(seed + 3))
        mask[..., -1] = True  # in a model every row sees a key
    elif kind == "added":
        mask = mx.random.normal(shape, key=mx.random.key(seed + 3))
    output = attention(queries, keys, values, 0.37, mask)
    wanted = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.37, mask=mask
    )
    assert output.shape == wanted.shape
    assert output.dtype == mx.float32
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5)


def test_what_is_masked_is_not_felt() -> None:
    queries, keys = heads((1, 2, 3, 8), 1), heads((1, 2, 9, 8), 2)
    values = heads((1, 2, 9, 8), 3)
    mask = mx.arange(9)[None] < mx.array([[4], [5], [6]])
    output = attention(queries, keys, values, 1.0, mask)
    keys[..., 6:, :] = 1e30
    values[..., 6:, :] = 1e30
    assert mx.array_equal(attention(queries, keys, values, 1.0, mask), output)


def test_a_value_that_is_no_number_is_felt() -> None:
    queries, keys = heads((1, 1, 2, 8), 1), heads((1, 1, 5, 8), 2)
    for bad in (keys, heads((1, 1, 5, 8), 3)):
        bad[..., 1, :] = float("nan")
        values = keys if bad is keys else bad
        assert mx.isnan(attention(queries, keys, values, 1.0, "causal")).all()
