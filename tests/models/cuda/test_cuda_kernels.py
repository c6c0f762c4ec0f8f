"""CUDA kernels for a few rows agree with stock operations in float32."""

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_speculation.models.cuda.attention import attention
from mlx_speculation.models.cuda.gated_delta import run_steps
from mlx_speculation.models.cuda.matmul import Weight, products
from mlx_speculation.models.round_context import cuda_serves

if not cuda_serves():  # one skip for hundreds of tests
    pytest.skip("the kernels are for CUDA, and there is none", allow_module_level=True)

HALVES = [mx.bfloat16, mx.float16]
ERROR = {mx.bfloat16: 2**-7, mx.float16: 2**-10}


def difference(actual: mx.array, wanted: mx.array) -> float:
    assert actual.shape == wanted.shape
    error = mx.abs(actual.astype(mx.float32) - wanted).max() / mx.abs(wanted).max()
    return float(error)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "lead", [(2,), (1, 5), (3, 3), (2, 2, 4), (16,), (3, 6), (32,)]
)
@pytest.mark.parametrize(("outputs", "width"), [(64, 64), (1000, 1408), (7, 4096)])
def test_a_product_is_that_of_its_values(
    dtype: mx.Dtype, lead: tuple[int, ...], outputs: int, width: int
) -> None:
    mx.random.seed(1)
    x = mx.random.normal((*lead, width)).astype(dtype)
    weight = mx.random.normal((outputs, width)).astype(dtype)
    wanted = x.astype(mx.float32) @ weight.astype(mx.float32).T
    (product,) = products(x, [Weight((weight,), 0)])
    assert difference(product, wanted) < ERROR[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("lead", [(2,), (1, 5), (9,), (2, 8), (17,), (4, 8)])
@pytest.mark.parametrize(("outputs", "width"), [(64, 128), (1000, 1408), (23, 4096)])
def test_a_product_of_four_bits_is_that_of_its_values(
    dtype: mx.Dtype, group: int, lead: tuple[int, ...], outputs: int, width: int
) -> None:
    mx.random.seed(2)
    x = mx.random.normal((*lead, width)).astype(dtype)
    weight = mx.random.normal((outputs, width)).astype(dtype)
    packed, scales, biases = mx.quantize(weight, group_size=group, bits=4)
    values = mx.dequantize(
        packed,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=group,
        bits=4,
    )
    wanted = x.astype(mx.float32) @ values.T
    (product,) = products(x, [Weight((packed, scales, biases), group)])
    assert difference(product, wanted) < ERROR[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("rows", [3, 11, 27])
@pytest.mark.parametrize(
    "outputs", [(512, 128, 128), (7, 1000), (33, 15, 16, 17), (16, 16)]
)
def test_products_together_are_those_of_each(
    dtype: mx.Dtype, group: int, rows: int, outputs: tuple[int, ...]
) -> None:
    mx.random.seed(6)
    x = mx.random.normal((1, rows, 256)).astype(dtype)
    weights = []
    for count in outputs:
        weight = mx.random.normal((count, 256)).astype(dtype)
        arrays = mx.quantize(weight, group_size=group, bits=4) if group else (weight,)
        weights.append(Weight(tuple(arrays), group))
    for one, each in zip(products(x, weights), weights, strict=True):
        assert mx.array_equal(one, products(x, [each])[0])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "rows", "columns"),
    [(1, 8, 2, 2, 5), (1, 4, 4, 5, 700), (3, 8, 2, 5, 300), (2, 6, 1, 17, 3000)],
)
@pytest.mark.parametrize("masked", ["causal", "no", "window", "each"])
def test_attention_is_that_of_its_values(
    dtype: mx.Dtype,
    dim: int,
    batch: int,
    heads: int,
    key_heads: int,
    rows: int,
    columns: int,
    masked: str,
) -> None:
    mx.random.seed(3)
    queries = mx.random.normal((batch, rows, heads, dim)).astype(dtype)
    queries = queries.swapaxes(1, 2)  # not contiguous, as in a model
    buffers = mx.random.normal((2, batch, key_heads, columns + 40, dim)).astype(dtype)
    keys, values = buffers[0, ..., :columns, :], buffers[1, ..., :columns, :]
    ends = mx.arange(columns - rows, columns)[:, None]
    places = mx.arange(columns)
    mask: mx.array | str | None = "causal" if masked == "causal" else None
    if masked == "window":
        mask = (places <= ends) & (places > ends - 4)
    if masked == "each":
        less = mx.arange(batch)[:, None, None, None]
        mask = places <= mx.maximum(ends - less, 0)
    strided = attention(queries, keys, values, 0.125, mask)
    kept = attention(queries, keys, values, 0.125, mask, contiguous=True)
    wanted = mx.fast.scaled_dot_product_attention(
        *(array.astype(mx.float32) for array in (queries, keys, values)),
        scale=0.125,
        mask=(places <= ends) if masked == "causal" else mask,
    )
    assert difference(strided, wanted) < ERROR[dtype]
    # The kernels for strided and contiguous inputs add in the same order, so they
    # agree bit for bit.
    assert mx.array_equal(strided, kept)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("columns", [300, 3000])
def test_attention_keeps_what_is_not_a_number_where_it_is_seen(
    columns: int, contiguous: bool
) -> None:
    queries = mx.ones((1, 2, 3, 64), mx.bfloat16)
    keys = mx.ones((1, 1, columns, 64), mx.bfloat16)
    keys[..., -1, 5] = float("nan")
    out = attention(queries, keys, keys, 0.1, "causal", contiguous=contiguous)
    nan_rows = mx.isnan(out).any(axis=-1)
    assert nan_rows.tolist() == [[[False, False, True]] * 2]


@pytest.mark.parametrize("dtype", [*HALVES, mx.float32])
@pytest.mark.parametrize("dims", [(128, 128), (64, 33), (256, 64)])
@pytest.mark.parametrize("heads", [(1, 1), (2, 6)])
@pytest.mark.parametrize(("batch", "rows"), [(1, 2), (1, 9), (3, 5)])
@pytest.mark.parametrize("by_channel", [False, True])
def test_gated_delta_steps_are_those_of_their_values(
    dtype: mx.Dtype,
    dims: tuple[int, int],
    heads: tuple[int, int],
    batch: int,
    rows: int,
    by_channel: bool,
) -> None:
    mx.random.seed(4)
    (dim, width), (shared, count) = dims, heads
    both = mx.random.normal((2, batch, rows, shared, dim)) / dim**0.5
    q, k = both.astype(dtype)
    v = mx.random.normal((batch, rows, count, width + 8)).astype(dtype)[..., :width]
    gates = (batch, rows, count, dim) if by_channel else (batch, rows, count)
    g = mx.random.uniform(0.2, 1.0, gates)
    beta = mx.random.uniform(0.0, 1.0, (batch, rows, count)).astype(dtype)
    state = mx.random.normal((batch, count, width, dim))
    steps = run_steps(q, k, v, g, beta, state)
    assert steps.y.dtype == dtype
    exact = [array.astype(mx.float32) for array in (q, k, v, g, beta)]
    q, k, v, g, beta = exact
    wanted, last = gated_delta_ops(q, k, v, g, beta, state)
    error = ERROR.get(dtype, 1e-5)
    assert difference(steps.y, wanted) < error
    assert difference(steps.last, last) < 1e-5
    for keep in (1, rows - 1, rows):
        q, k, v, g, beta = (each[:, :keep] for each in exact)
        _, kept = gated_delta_ops(q, k, v, g, beta, state)
        assert difference(steps.after(keep), kept) < 1e-5
