"""In rounds on x86-64 with OpenBLAS, layers call the attention in models/cpu.

The tests simulate such a machine. The last test uses OpenBLAS in another process.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.models import Lane, ModelHooks, cuda, round_context
from mlx_speculation.models.cpu import attention, exp, registration
from mlx_speculation.models.round_context import rows_of_a_round
from support.covering import others_slow
from support.models.census import BUILT, FEW, build
from support.processes.blas_processes import with_openblas
from support.processes.reader import ROOT, Reader

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(21)]
ROWS = [201, 7, 96, 255, 31]


@pytest.fixture(name="called")
def _called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let rounds use models/cpu; return a list of the functions that they call."""
    seen: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            seen.append(name)
            return function(*args)

        return call

    for module in (round_context, registration):
        monkeypatch.setattr(module, "x86_serves", lambda: True)
    for other in (round_context, cuda.registration):
        monkeypatch.setattr(other, "cuda_serves", lambda: False)
    monkeypatch.setattr(
        attention, "attention", noting("attention", attention.attention)
    )
    monkeypatch.setattr(attention, "exponentials", noting("exp", exp.exponentials))
    # A GPU rounds float32 products more coarsely.
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield seen
    mx.set_default_device(device)


def rows_of(model: nn.Module, *, hooked: bool, rows: list[int] = ROWS) -> mx.array:
    recorders = ModelHooks(model) if hooked else None
    try:
        lane = Lane(model, make_prompt_cache(model))
        lane.feed(PROMPT)
        with lane.begin() as lane_round:
            output = lane_round.forward(mx.array(rows))
            mx.eval(output)
    finally:
        if recorders is not None:
            recorders.remove()
    return output


@pytest.mark.parametrize("name", others_slow(BUILT, FEW))
def test_a_model_computes_what_it_did(name: str, called: list[str]) -> None:
    model = build(name)
    kinds = [type(module) for module in model.modules()]
    wanted = rows_of(model, hooked=False)
    assert not called
    rows = rows_of(model, hooked=True)
    np.testing.assert_allclose(rows, wanted, rtol=1e-3, atol=1e-3)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text", "mixtral"])
def test_rounds_call_what_stands_in(name: str, called: list[str]) -> None:
    rows_of(build(name), hooked=True)
    assert set(called) == {"attention", "exp"}


def test_prompts_and_plain_steps_are_those_of_mlx(called: list[str]) -> None:
    model = build("llama")
    wanted = model(mx.array([PROMPT]))
    recorders = ModelHooks(model)
    lane = Lane(model, make_prompt_cache(model))
    with lane.begin(whole=True) as prompt:
        assert mx.array_equal(prompt.forward(mx.array(PROMPT)), wanted[0])
        prompt.commit(len(PROMPT))
    with lane.begin() as single:
        mx.eval(single.forward(mx.array([5])))
    recorders.remove()
    assert not called


def test_a_lane_of_a_draft_reads_prompts_as_in_a_round(called: list[str]) -> None:
    model = build("llama")
    prompt = [(11 * i * i + i) % 256 for i in range(150)]
    wanted = model(mx.array([prompt]))[0]
    recorders = ModelHooks(model)
    lane = Lane(model, make_prompt_cache(model))
    lane.is_draft = True
    lane.feed(prompt[:-1])
    assert set(called) == {"attention", "exp"}
    with lane.begin() as one:
        output = one.forward(mx.array(prompt[-1:]))
    recorders.remove()
    np.testing.assert_allclose(output, wanted[-1:], rtol=1e-4, atol=1e-4)


def test_they_are_compiled_when_the_hooks_are_made(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first text would wait for the compiler."""
    made: list[str] = []
    monkeypatch.setattr(exp, "compile_here", lambda: made.append("compiled"))
    ModelHooks(build("llama")).remove()
    assert made == ["compiled"]
    assert not called


def test_what_somebody_else_put_there_is_called(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    theirs: list[str] = []

    def other(queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        theirs.append("attention")
        return queries

    monkeypatch.setattr(llama, "scaled_dot_product_attention", other)
    recorders = ModelHooks(model)
    with rows_of_a_round():
        model(mx.array([ROWS]))
    recorders.remove()
    assert theirs
    assert not called


def test_attention_serves_what_it_can() -> None:
    queries, keys = mx.zeros((1, 4, 3, 8)), mx.zeros((1, 2, 9, 8))

    class Quantized:
        bits = 8

    assert attention.serves(queries, keys, keys, None, None)
    assert not attention.serves(queries, keys, keys, None, mx.zeros((4,)))
    assert not attention.serves(queries, keys, keys, Quantized(), None)
    assert not attention.serves(queries[:, :, :1], keys, keys, None, None)
    assert not attention.serves(queries[:, :3], keys, keys, None, None)
    half = keys.astype(mx.bfloat16)
    assert not attention.serves(queries, half, half, None, None)
    assert attention.serves(mx.zeros((1, 4, 333, 8)), keys, keys, None, None)


WITH_OPENBLAS = """
import runpy
import mlx.core as mx
from mlx_speculation.models.cpu import attention as blas_attention
from mlx_speculation.models.round_context import x86_serves
from support.models.census import build
rows_of = runpy.run_path("tests/models/ops/test_round_ops.py")["rows_of"]
seen = []
attention = blas_attention.attention
blas_attention.attention = lambda *a: seen.append(0) or attention(*a)
model = build("llama")
try:
    wanted, found = (rows_of(model, hooked=hooked) for hooked in (False, True))
finally:
    blas_attention.attention = attention
same = mx.allclose(found, wanted, 1e-3, 1e-3).item()
print(same, x86_serves(), len(seen), len(model.layers))
"""


@with_openblas
def test_with_openblas_in_front_rounds_call_what_stands_in(reader: Reader) -> None:
    said = reader.snippets("rounds", [WITH_OPENBLAS], ROOT)
    same, serves, seen, layers = said.out.split()
    assert same == "True"
    assert seen == (layers if serves == "True" else "0")
