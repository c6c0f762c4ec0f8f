"""Blocks of gated delta steps computed at once equal the plain recurrence."""

import importlib
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gated_delta import (
    gated_delta_ops,
    gated_delta_update,
    normalize_qk,
)
from numpy.typing import NDArray

from mlx_speculation.caches import Speculation
from mlx_speculation.models import ModelHooks, round_context
from mlx_speculation.models.cuda import gated_delta, registration
from mlx_speculation.models.recurrent import chunked_delta
from mlx_speculation.models.recurrent.chunked_delta import (
    gated_delta_in_chunks,
    run_chunk,
)
from support.caches.cache_twins import detached
from support.identity import GREEDY, check_identity, prompt_of
from support.models.recurrent_models import (
    BLOCK,
    RECURRENT_MODELS,
    build_recurrent,
    prefilled,
    recurrent,
)
from support.processes.blas_processes import with_openblas
from support.processes.reader import ROOT, Reader

SCALAR_DECAYS = ("qwen3_5", "qwen3_next(moe)", "olmo_hybrid")
VECTOR_DECAYS = ("kimi_linear", "bailing_moe_v3")
ERROR = 1e-5  # for values of about one

Array = NDArray[np.float64]


@pytest.fixture(name="in_chunks")
def _in_chunks(monkeypatch: pytest.MonkeyPatch) -> list[chunked_delta.Chunk]:
    """Let chunks run with any BLAS; return the list of chunks that ran."""
    made: list[chunked_delta.Chunk] = []

    def noted(*args: Any) -> chunked_delta.Chunk:
        made.append(run_chunk(*args))
        return made[-1]

    monkeypatch.setattr(chunked_delta, "rows_differ", lambda dtype: dtype == mx.float32)
    monkeypatch.setattr(chunked_delta, "run_chunk", noted)
    return made


def recurrence(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, list[Array]]:
    """Compute row by row; return all outputs, and the state after each row."""
    batch, rows, heads, _ = v.shape
    ratio = heads // k.shape[2]
    y, after, current = np.zeros_like(v), [], state.copy()
    for t in range(rows):
        for one in range(batch):
            for head in range(heads):
                before, key = current[one, head], k[one, t, head // ratio]  # [Dv, Dk]
                fresh = g[one, t, head] * before
                error = v[one, t, head] - fresh @ key
                fresh = fresh + beta[one, t, head] * np.outer(error, key)
                y[one, t, head] = fresh @ q[one, t, head // ratio]
                current[one, head] = fresh
        after.append(current.copy())
    return y, after


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, mx.array]:
    """Draw a block, often with gates near their limits, or with keys that are alike."""
    rows = draw(st.integers(2, 18))
    batch, key_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    ratio, dim, width = (draw(st.integers(1, n)) for n in (3, 9, 6))
    heads = key_heads * ratio
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    alike = draw(st.sampled_from([0.0, 0.9, 1.0]))

    def units(shape: tuple[int, ...]) -> Array:
        vectors = rng.normal(size=shape)
        vectors = alike * vectors[:, :1] + (1 - alike) * vectors
        unit: Array = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
        return unit

    def gates(low: float, high: float) -> Array:
        kind = draw(st.sampled_from(["any", "low", "high", "mixed"]))
        near = 10.0 ** rng.uniform(-30, -1, (batch, rows, heads))
        near[rng.random(near.shape) < 0.2] = 0.0
        ends = {"low": low + near, "high": high - near}
        ends["any"] = rng.uniform(low, high, near.shape)
        which = rng.integers(0, 3, near.shape)
        ends["mixed"] = np.choose(which, [ends[one] for one in ("low", "high", "any")])
        return np.clip(ends[kind], low, high)

    block = {
        "q": units((batch, rows, key_heads, dim)),
        "k": units((batch, rows, key_heads, dim)),
        "v": rng.normal(size=(batch, rows, heads, width)),
        "g": gates(0.0, 1.0),
        "beta": gates(0.0, draw(st.sampled_from([1.0, 2.0]))),
    }
    made = {name: mx.array(value.astype(np.float32)) for name, value in block.items()}
    if draw(st.booleans()):
        size = (batch, heads, width, dim)
        made["state"] = mx.array(rng.normal(size=size).astype(np.float32))
    return made


def as_float64(block: dict[str, mx.array]) -> dict[str, Array]:
    """Return the block in float64, with zeros as the default state."""
    batch, _, heads, width = block["v"].shape
    whole = {"state": mx.zeros((batch, heads, width, block["k"].shape[-1])), **block}
    return {name: np.array(value).astype(np.float64) for name, value in whole.items()}


@given(blocks())
def test_a_block_is_the_recurrence_row_by_row_and_after_each_prefix(
    block: dict[str, mx.array],
) -> None:
    result = run_chunk(**block)
    y, after = recurrence(**as_float64(block))
    scale = 1 + max(np.abs(y).max(), *(np.abs(state).max() for state in after))
    np.testing.assert_allclose(np.array(result.y), y, rtol=0, atol=ERROR * scale)
    for keep, wanted in enumerate(after, start=1):
        state = np.array(result.after(keep))
        np.testing.assert_allclose(
            state, wanted, rtol=0, atol=ERROR * scale, err_msg=f"{keep}"
        )


def scan_arguments(rows: int, *, vector: bool = False) -> dict[str, Any]:
    keys = mx.random.split(mx.random.key(rows), 6)
    size = (2, rows, 4)
    q, k = (mx.random.normal((2, rows, 2, 8), key=key) for key in keys[:2])
    q, k = normalize_qk(q, k, inv_scale=8**-0.5, eps=1e-6)
    return {
        "q": q,
        "k": k,
        "v": mx.random.normal((*size, 5), key=keys[2]),
        "a": mx.random.normal((*size, 8) if vector else size, key=keys[3]),
        "b": mx.random.normal(size, key=keys[4]),
        "A_log": mx.array([[-1.0], [0.0], [1.0], [2.0]])
        if vector
        else mx.array([-1.0, 0.0, 1.0, 2.0]),
        "dt_bias": mx.ones((4, 8)) if vector else mx.ones(4),
        "state": mx.random.normal((2, 4, 5, 8), key=keys[5]),
    }


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("rows", [2, 7, chunked_delta.LONGEST])
@pytest.mark.parametrize(
    "options", [{}, {"allow_neg_eigval": True}, {"lower_bound": -5.0}]
)
def test_it_takes_what_mlx_lms_scan_takes(rows: int, options: dict[str, Any]) -> None:
    arguments = scan_arguments(rows)
    result = gated_delta_in_chunks(**arguments, **options, use_kernel=True)
    assert result is not None
    y, state = gated_delta_update(**arguments, **options)
    np.testing.assert_allclose(result.y, y, rtol=0, atol=1e-5)
    np.testing.assert_allclose(result.after(rows), state, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("in_chunks")
def test_mlx_lms_scan_runs_where_a_chunk_does_not_serve() -> None:
    assert gated_delta_in_chunks(**scan_arguments(2)) is not None
    assert gated_delta_in_chunks(**scan_arguments(1)) is None
    assert gated_delta_in_chunks(**scan_arguments(chunked_delta.LONGEST + 1)) is None
    assert gated_delta_in_chunks(**scan_arguments(2, vector=True)) is None
    half = {n: v.astype(mx.bfloat16) for n, v in scan_arguments(2).items()}
    assert gated_delta_in_chunks(**half) is None
    mask = mx.ones((2, 2), mx.bool_)
    assert gated_delta_in_chunks(**scan_arguments(2), mask=mask) is None


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(
    ("rows", "dim", "ours"), [(2, 32, True), (1, 32, False), (2, 8, False)]
)
def test_on_cuda_the_kernel_runs_what_it_is_made_for(
    rows: int, dim: int, ours: bool, vector: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA is simulated; mlx-lm's loop replaces the kernel."""
    requests: list[tuple[mx.array, ...]] = []

    def run(*inputs: Any) -> list[mx.array]:
        requests.append(inputs)
        return list(gated_delta_ops(*inputs))

    monkeypatch.setattr(round_context, "_device_here", lambda: "cuda")
    monkeypatch.setattr(registration, "kernels_compile", lambda: True)
    monkeypatch.setattr(gated_delta, "_run", run)
    arguments = scan_arguments(rows, vector=vector)
    for name in "qk":
        arguments[name] = mx.tile(arguments[name], [1, 1, 1, 4])[..., :dim]
    arguments["state"] = mx.tile(arguments["state"], [1, 1, 1, 4])[..., :dim]
    if vector:
        arguments["a"] = mx.tile(arguments["a"], [1, 1, 1, 4])[..., :dim]
        arguments["dt_bias"] = mx.tile(arguments["dt_bias"], [1, 4])[..., :dim]
    with round_context.rows_of_a_round():
        result = gated_delta_in_chunks(**arguments)
    assert (result is not None) is ours
    if result is not None:
        y, state = gated_delta_update(**arguments)
        np.testing.assert_allclose(result.y, y, rtol=0, atol=1e-5)
        np.testing.assert_allclose(result.after(rows), state, rtol=0, atol=1e-5)
        first = {
            name: value[:, :1] if name in "qkvab" else value
            for name, value in arguments.items()
        }
        _, state = gated_delta_update(**first)
        np.testing.assert_allclose(result.after(1), state, rtol=0, atol=1e-5)
    assert gated_delta_in_chunks(**arguments) is None  # outside of a round


def _close(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(recurrent(ours), recurrent(theirs), strict=True):
        for actual, wanted in zip(one.cache, other.cache, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SCALAR_DECAYS)
def test_a_model_keeps_a_prefix_without_running_anything_again(
    name: str, in_chunks: list[chunked_delta.Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_recurrent(name)
    start = prefilled(model)
    owner = ModelHooks(model)
    plain = detached(start)
    logits = model(BLOCK, cache=plain)
    try:
        for keep in range(1, 7):
            caches, twin = detached(start), detached(start)
            model(BLOCK[:, :keep], cache=twin)
            with Speculation(caches) as speculation:
                round_logits = model(BLOCK, cache=speculation.caches)
                np.testing.assert_allclose(round_logits, logits, rtol=1e-4, atol=1e-4)
                with monkeypatch.context() as patch:
                    home = importlib.import_module("mlx_lm.models.gated_delta")
                    patch.setattr(home, "gated_delta_ops", _forbidden)
                    speculation.commit(keep)
            assert not speculation.reran
            _close(caches, twin)
        assert len(in_chunks) == 6 * len(recurrent(start))
    finally:
        owner.remove()


def _forbidden(*args: Any) -> Any:
    raise AssertionError("the recurrence ran in a replay")


@pytest.mark.parametrize("name", [*SCALAR_DECAYS, *VECTOR_DECAYS])
def test_text_stays_what_it_was(
    name: str, in_chunks: list[chunked_delta.Chunk]
) -> None:
    """Texts may differ at a near-tie: a chunk and single steps round differently."""
    seen = check_identity(
        build_recurrent(name),
        prompt_of(9),
        draft_length=4,
        tokens=24,
        bitwise=False,
        kinds=["turning"],
        samplings=[GREEDY],
    )
    assert seen.rejected
    assert not seen.reruns
    assert not seen.mixer_reruns
    assert bool(in_chunks) == (name in SCALAR_DECAYS)


def test_plain_decoding_and_prompts_are_left_to_mlx_lm(
    in_chunks: list[chunked_delta.Chunk],
) -> None:
    assert RECURRENT_MODELS["qwen3_5"].bitwise
    seen = check_identity(
        build_recurrent("qwen3_5"),
        prompt_of(40),
        draft_length=0,
        tokens=8,
        bitwise=True,
        kinds=(),
    )
    assert not seen.near_ties
    assert not in_chunks


WITH_OPENBLAS = """
from mlx_lm.models.cache import make_prompt_cache
from mlx_speculation.models import Lane, ModelHooks
from mlx_speculation.models.recurrent import chunked_delta
from support.models.recurrent_models import build_recurrent
import mlx.core as mx
ran = []
native = chunked_delta.run_chunk
chunked_delta.run_chunk = lambda *args: ran.append(1) or native(*args)
try:
    model = build_recurrent("qwen3_5")
    owner = ModelHooks(model)
    lane = Lane(model)
    lane.feed([1, 2, 3])
    for width in (1, 4):
        with lane.begin() as lane_round:
            mx.eval(lane_round.forward(mx.array([7] * width)))
            lane_round.commit(1)
        print(width, len(ran))
    owner.remove()
finally:
    chunked_delta.run_chunk = native
"""


@with_openblas
@pytest.mark.skipif(sys.platform != "linux", reason="BLAS is fixed on macOS")
def test_with_openblas_in_front_a_verify_runs_in_chunks(reader: Reader) -> None:
    said = reader.snippets("chunks", [WITH_OPENBLAS], ROOT)
    layers = len(recurrent(make_prompt_cache(build_recurrent("qwen3_5"))))
    assert said.out.split() == ["1", "0", "4", str(layers)]
