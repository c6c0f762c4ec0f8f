"""Attention padded to a few sizes equals mlx's own, over shapes and masks.

Padding uses stock operations, so the tests run on a CPU.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_speculation.caches import whole_steps
from mlx_speculation.models.cuda import padded_attention, registration
from mlx_speculation.models.round_context import rows_of_a_round
from mlx_speculation.models.shape_buckets import row_size

pytestmark = pytest.mark.usefixtures("on_the_cpu")

Shown = tuple[int, int, str]  # rows, keys, the kind of mask


def normal(shape: tuple[int, ...], seed: int) -> mx.array:
    made: mx.array = mx.random.normal(shape, key=mx.random.key(seed))
    return made


@given(
    batch=st.integers(1, 3),
    shared=st.integers(1, 2),
    ratio=st.integers(1, 3),
    rows=st.integers(1, 40) | st.sampled_from([48, 49, 131]),
    before=st.integers(0, 40) | st.sampled_from([381, 470, 512]),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kind=st.sampled_from(
        ["none", "causal", "bool", "bool by batch", "bool by head", "one row"]
    ),
    seed=st.integers(0, 2**31),
)
@example(1, 1, 1, 40, 0, (8, 8), "causal", 1)  # mask stays "causal"
@example(1, 1, 1, 40, 512, (8, 8), "causal", 1)
@example(1, 1, 1, 40, 0, (8, 8), "bool", 1)
@example(1, 1, 1, 40, 0, (8, 8), "none", 1)
@example(1, 1, 1, 48, 464, (8, 8), "bool", 1)  # nothing is padded
@example(1, 1, 1, 40, 472, (8, 8), "causal", 1)  # rows are padded
@example(1, 1, 1, 48, 100, (8, 8), "one row", 1)  # keys are padded
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
    queries = normal((batch, shared * ratio, rows, dims[0]), seed)
    keys = normal((batch, shared, count + 3, dims[0]), seed + 1)[..., :count, :]
    values = normal((batch, shared, count + 3, dims[1]), seed + 2)[..., :count, :]
    first = {"bool by batch": (batch, 1), "bool by head": (batch, shared * ratio)}
    shape = (*first.get(kind, ()), 1 if kind == "one row" else rows, count)
    mask: Any = {"none": None, "causal": "causal"}.get(kind)
    if kind not in ("none", "causal"):
        mask = (normal(shape, seed + 3) > 0) | (mx.arange(count) == before)
    scale = dims[0] ** -0.5
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask
    )
    with rows_of_a_round():
        for _ in range(2):  # for two layers of one model
            output = padded_attention.attention(queries, keys, values, scale, mask)
            assert output.shape == expected.shape
            np.testing.assert_allclose(output, expected, atol=2e-5, rtol=2e-5)


def test_layers_of_one_forward_may_have_masks_of_their_own() -> None:
    """Some layers of a model see only a window of keys."""
    windows = [mx.tri(40, 50, k=10 - n, dtype=mx.bool_) for n in (0, 3)]
    requests: list[tuple[Any, int]] = [("causal", 47), ("causal", 50), (None, 50)]
    requests += [(mask, 50) for mask in (*windows, windows[0])]
    with rows_of_a_round():
        for mask, count in requests:
            queries, keys = normal((1, 2, 40, 8), 1), normal((1, 1, count, 8), 2)
            output = padded_attention.attention(queries, keys, keys, 0.3, mask)
            expected = mx.fast.scaled_dot_product_attention(
                queries, keys, keys, scale=0.3, mask=mask
            )
            np.testing.assert_allclose(output, expected, atol=2e-5, rtol=2e-5)


@pytest.fixture(name="shown_sizes")
def _shown_sizes(monkeypatch: pytest.MonkeyPatch) -> list[Shown]:
    """Pad sizes as for cuDNN; return the sizes and masks that mlx's attention gets."""
    seen: list[Shown] = []
    theirs = mx.fast.scaled_dot_product_attention

    def noting(queries: mx.array, keys: mx.array, *rest: Any, **named: Any) -> Any:
        mask = named["mask"]
        kind = mask if isinstance(mask, str) else type(mask).__name__
        seen.append((queries.shape[2], keys.shape[2], kind))
        return theirs(queries, keys, *rest, **named)

    monkeypatch.setattr(padded_attention, "asks_cudnn", lambda dtype: True)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noting)
    return seen


def test_prompts_of_all_lengths_show_few_sizes(shown_sizes: list[Shown]) -> None:
    """cuDNN plans each new size, which takes about 40 ms."""
    sizes = [48, 64, 96, 128, 192, 256, 384, 512]
    for before in (0, 512):
        for rows in range(33, 513):
            show(rows, before)
        assert set(shown_sizes) == {(size, before + size, "causal") for size in sizes}
        shown_sizes.clear()


def test_what_is_read_after_a_pause_shows_few_sizes(shown_sizes: list[Shown]) -> None:
    for before in range(512, 1024, 7):
        for rows in range(33, 97):
            show(rows, before)
    sizes = [48, 64, 96]
    counts = {(rows, keys) for rows, keys, _ in shown_sizes}
    first = {(size, 512 + size) for size in sizes}  # without a mask array
    assert counts == first | {(size, keys) for size in sizes for keys in (1024, 1536)}


def show(rows: int, before: int) -> None:
    """Ask for attention with a causal mask."""
    queries, keys = mx.zeros((1, 2, rows, 48)), mx.zeros((1, 1, before + rows, 48))
    with rows_of_a_round():
        output = registration.attend(queries, keys, keys, None, 1.0, "causal")
    assert output.shape == queries.shape


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "added", "short"])
@pytest.mark.parametrize("sinks", [False, True])
def test_who_is_asked(
    rows: int, kind: str, sinks: bool, shown_sizes: list[Shown]
) -> None:
    """The CUDA kernel does not take a head dimension of 48, so mlx's own runs."""
    count = rows + 7
    queries = normal((1, 2, rows, 48), 1).astype(mx.bfloat16)
    keys = normal((1, 1, count, 48), 2).astype(mx.bfloat16)
    masks: dict[str, Any] = {
        "causal": "causal",
        "bool": mx.tri(rows, count, k=7, dtype=mx.bool_),
        "added": mx.zeros((rows, count), mx.bfloat16),
        "short": mx.ones((rows, 1), mx.bool_),
    }
    mask = masks.get(kind)
    sink = mx.zeros((2,), mx.bfloat16) if sinks else None
    expected = scaled_dot_product_attention(
        queries, keys, keys, None, scale=0.2, mask=mask, sinks=sink
    )
    shown_sizes.clear()
    with rows_of_a_round():
        output = registration.attend(queries, keys, keys, None, 0.2, mask, sink)
    np.testing.assert_allclose(
        output.astype(mx.float32), expected.astype(mx.float32), atol=2e-2
    )
    plans = rows > 1 or kind == "bool"
    in_sizes = plans and not sinks and kind in ("none", "causal", "bool")
    sizes = (row_size(rows), whole_steps(count), "array")
    native = (rows, count, "causal" if kind == "causal" else type(mask).__name__)
    assert shown_sizes == [sizes if in_sizes else native]


def test_other_dtypes_and_quantized_keys_are_left_to_mlx_lm(
    shown_sizes: list[Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Quantized:
        bits = 8

    queries = mx.zeros((1, 2, 40, 48), mx.bfloat16)
    keys = mx.zeros((1, 1, 44, 48), mx.bfloat16)
    serves = padded_attention.serves
    assert serves(queries, keys, keys, None, "causal", None)
    assert not serves(queries, keys, keys, Quantized(), "causal", None)
    single = queries.astype(mx.float32)
    assert not serves(single, keys, keys, None, "causal", None)
    monkeypatch.undo()
    assert not serves(queries, keys, keys, None, "causal", None)  # on a CPU
    assert shown_sizes == []
