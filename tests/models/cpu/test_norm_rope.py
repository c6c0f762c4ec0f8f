"""Fused norms and rotations are mlx's own, bit for bit on an x86-64 CPU."""

import platform
import re
from collections.abc import Iterator
from io import StringIO
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.models import BatchLane, Lane, ModelHooks, cuda, round_context
from mlx_speculation.models.cpu import norm_rope, registration
from mlx_speculation.models.round_context import rows_of_a_round
from support.covering import others_slow
from support.models.census import BUILT, FEW, build

EXACT = platform.machine() in ("x86_64", "AMD64")


@pytest.fixture(autouse=True, scope="module")
def _on_the_cpu() -> Iterator[None]:
    """Run on the CPU: on a GPU mlx has kernels for these operations."""
    with mx.stream(mx.cpu):
        yield


def same(actual: mx.array, wanted: mx.array) -> None:
    assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
    if EXACT:
        assert mx.array_equal(actual, wanted, equal_nan=True)
    else:  # other compilers fuse a product and a sum
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-6)


def normal(shape: tuple[int, ...], seed: int) -> mx.array:
    made: mx.array = mx.random.normal(shape, key=mx.random.key(seed))
    return made


@given(
    lead=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    dim=st.integers(1, 300),
    eps=st.sampled_from([0.0, 1e-6, 1e-5, 0.1]),
    tokens=st.sampled_from([1, 64, 65]),
    turned=st.booleans(),
    size=st.sampled_from([1.0, 1e-4, 1e4, float("inf"), float("nan")]),
    seed=st.integers(0, 2**31),
)
def test_a_norm_is_mlxs(
    lead: list[int],
    dim: int,
    eps: float,
    tokens: int,
    turned: bool,
    size: float,
    seed: int,
) -> None:
    x = normal((*lead, dim), seed) * size
    if turned and len(lead) > 1:
        x = x.swapaxes(-2, -3)  # a view, like heads in a model
    weight = normal((dim,), seed + 1)
    with rows_of_a_round(tokens):
        same(norm_rope.rms_norm(x, weight, eps), mx.fast.rms_norm(x, weight, eps))


@given(
    heads=st.integers(1, 4),
    rows=st.integers(1, 9),
    width=st.integers(1, 70),
    tokens=st.sampled_from([1, 64, 65]),
    seed=st.integers(0, 2**31),
)
def test_a_rotation_is_two_products_and_their_sum(
    heads: int, rows: int, width: int, tokens: int, seed: int
) -> None:
    x, swapped = (normal((1, rows, heads, width), seed + n) for n in (0, 1))
    x, swapped = x.swapaxes(1, 2), swapped.swapaxes(1, 2)
    by_x, by_swapped = (normal((1, rows, width), seed + n) for n in (2, 3))
    with rows_of_a_round(tokens):
        rotated = norm_rope.turned(x, swapped, by_x, by_swapped)
    same(rotated, x * by_x + swapped * by_swapped)


@pytest.mark.parametrize(
    ("of_x", "of_weight"),
    [
        (mx.bfloat16, mx.bfloat16),
        (mx.float16, mx.float32),
        (mx.float32, mx.bfloat16),
        (mx.float32, None),
    ],
)
def test_other_dtypes_and_no_weight_are_left_to_mlx(
    of_x: mx.Dtype, of_weight: mx.Dtype | None
) -> None:
    x = normal((3, 8), 1).astype(of_x)
    weight = None if of_weight is None else normal((8,), 2).astype(of_weight)
    with rows_of_a_round():
        normed = norm_rope.rms_norm(x, weight, 1e-6)
    wanted = mx.fast.rms_norm(x, weight, 1e-6)
    assert normed.dtype == wanted.dtype
    assert mx.array_equal(normed, wanted)
    assert operations(normed) == operations(wanted)


def operations(array: mx.array) -> int:
    """Return the number of pending operations of an array, without views."""
    text = StringIO()
    mx.export_to_dot(text, array)
    names = re.findall(r'label ?= ?"([^"]+)"', text.getvalue())
    return sum(name not in ("Broadcast", "Transpose", "Slice") for name in names)


def test_few_operations_are_left_of_them() -> None:
    x, weight = normal((1, 3, 2, 8), 1), normal((8,), 2)
    tables = normal((1, 2, 8), 3)
    mx.eval(x, weight, tables)
    for tokens, of_norm, of_rotation in ((3, 3, 1), (64, 3, 1), (65, 7, 3)):
        with rows_of_a_round(tokens):
            assert operations(norm_rope.rms_norm(x, weight, 1e-6)) == of_norm
            assert operations(norm_rope.turned(x, x, tables, tables)) == of_rotation


@pytest.fixture(name="called")
def _called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let round ops serve here; return the token count of each forward that asks."""
    seen: list[int] = []
    ours = norm_rope.serves

    def noting() -> bool:
        seen.append(round_context.forward_of_round().tokens)
        return ours()

    for module in (round_context, registration):
        monkeypatch.setattr(module, "x86_serves", lambda: True)
    for other in (round_context, cuda.registration):
        monkeypatch.setattr(other, "cuda_serves", lambda: False)
    monkeypatch.setattr(norm_rope, "serves", noting)
    return seen


@pytest.mark.parametrize("name", others_slow(BUILT, FEW))
def test_a_model_computes_what_it_did(name: str, called: list[int]) -> None:
    rows = [201, 7, 96, 255, 31]
    model = build(name)

    def round_logits(hooked: bool) -> mx.array:
        recorders = ModelHooks(model) if hooked else None
        lane = Lane(model, make_prompt_cache(model))
        lane.feed(list(range(1, 20)))
        with lane.begin() as lane_round:
            logits = lane_round.forward(mx.array(rows))
            mx.eval(logits)
        if recorders is not None:
            recorders.remove()
        return logits

    np.testing.assert_allclose(
        round_logits(True), round_logits(False), rtol=1e-3, atol=1e-3
    )
    norms = [m for m in model.modules() if isinstance(m, nn.RMSNorm)]
    assert set(called) <= {len(rows)}
    assert bool(called) or not norms


def test_a_prompt_that_a_draft_reads_says_how_long_it_is(called: list[int]) -> None:
    model = build("llama")
    recorders = ModelHooks(model)
    lane = Lane(model, make_prompt_cache(model))
    lane.is_draft = True
    lane.feed(list(range(1, 90)))
    recorders.remove()
    assert set(called) == {89}


def test_a_batch_says_how_many_tokens_all_rows_have(called: list[int]) -> None:
    model = build("llama")
    recorders = ModelHooks(model)
    lanes = [Lane(model, make_prompt_cache(model)) for _ in range(2)]
    for lane in lanes:
        lane.feed([1, 2, 3])
    batch = BatchLane(model)
    batch.join(lanes)
    with batch.begin(4) as batch_round:
        mx.eval(batch_round.forward(mx.ones((2, 4), mx.uint32)))
    recorders.remove()
    assert set(called) == {8}


def test_both_are_compiled_when_the_hooks_are_made(
    called: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(norm_rope, "compile_here", lambda: made.append("compiled"))
    ModelHooks(build("llama")).remove()
    assert made == ["compiled"]
    assert not called
