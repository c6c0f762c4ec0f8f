"""With transposed weights, linear layers compute the same in fewer operations.

CUDA is simulated: the layers compute the same on every device.
"""

import gc
import io
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation import SpeculativeGenerator
from mlx_speculation.models import ModelHooks
from mlx_speculation.models.cuda import linear as few_rows
from mlx_speculation.models.cuda import transposed_weights as transposed
from mlx_speculation.models.cuda.transposed_weights import transposed_weights
from mlx_speculation.models.instance_hooks import round_hooks
from support.models.tiny_models import build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@pytest.fixture(autouse=True, scope="module")
def _as_on_cuda() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transposed, "cuda_serves", lambda: True)
        yield


def linear(width: int, outputs: int, seed: int, *, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(width, outputs, bias=bias)
    keys = mx.random.split(mx.random.key(seed))
    layer.weight = mx.random.normal((outputs, width), key=keys[0])
    if bias:
        layer.bias = mx.random.normal((outputs,), key=keys[1])
    return layer


def operations(result: mx.array) -> int:
    """Return the number of operations in an array's graph."""
    text = io.StringIO()
    mx.export_to_dot(text, result)
    return text.getvalue().count("shape=rectangle")


def layers_of(model: Any) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


@given(
    width=st.integers(1, 40),
    outputs=st.integers(1, 40),
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    bias=st.booleans(),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_layer_computes_what_mlxs_does_to_the_last_bit(
    width: int, outputs: int, rows: list[int], bias: bool, dtype: str, seed: int
) -> None:
    layer = linear(width, outputs, seed, bias=bias)
    layer.set_dtype(DTYPES[dtype])
    x = mx.random.normal((*rows, width), key=mx.random.key(seed)).astype(DTYPES[dtype])
    expected, usual = layer(x).tolist(), operations(layer(x))
    recorders = ModelHooks(layer)
    for within in (False, True, False):
        with transposed_weights(layer) if within else nullcontext():
            result = layer(x)
            assert type(layer) is not nn.Linear
            assert operations(result) == usual - within
            assert result.tolist() == expected
    recorders.remove()
    assert type(layer) is nn.Linear
    assert layer(x).tolist() == expected


def replace_weight(layer: nn.Linear) -> None:
    layer.update({"weight": layer["weight"] * 3})


def change_weight(layer: nn.Linear) -> None:
    layer.weight *= 3  # the same object, other numbers
    mx.eval(layer["weight"])


@pytest.mark.parametrize("change", [replace_weight, change_weight])
def test_another_weight_is_used_at_once_or_when_the_stream_has_ended(
    change: Callable[[nn.Linear], None],
) -> None:
    layer, x = linear(8, 6, 0), mx.random.normal((3, 8))
    recorders = ModelHooks(layer)
    with transposed_weights(layer):
        change(layer)
        replaced = layer(x).tolist()
    expected = (x @ layer["weight"].T).tolist()
    assert (replaced == expected) == (change is replace_weight)
    assert layer(x).tolist() == expected
    with transposed_weights(layer):
        assert layer(x).tolist() == expected
    recorders.remove()


def test_old_weights_are_let_go_of_when_the_stream_has_ended() -> None:
    layer = linear(8, 6, 0)
    recorders = ModelHooks(layer)
    old = weakref.ref(layer["weight"])
    with transposed_weights(layer):
        replace_weight(layer)
        mx.eval(layer["weight"])
    gc.collect()
    assert old() is None
    recorders.remove()


@pytest.mark.parametrize("first", [False, True])
def test_a_method_that_somebody_put_in_mlxs_class_is_called(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = linear(8, 6, 0), mx.random.normal((3, 8))
    usual, native = layer(x), nn.Linear.__call__
    transposed._transposed.cache_clear()
    recorders = None if first else ModelHooks(layer)
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: native(self, x) + 1)
    recorders = recorders or ModelHooks(layer)
    with transposed_weights(layer):
        assert layer(x).tolist() == (usual + 1).tolist()
    recorders.remove()
    transposed._transposed.cache_clear()


def test_streams_that_overlap_share_views_until_the_last_has_ended() -> None:
    layer, x = linear(8, 6, 0), mx.random.normal((3, 8))
    mx.eval(x, layer.parameters())
    usual = operations(layer(x))
    recorders = ModelHooks(layer)
    for last in (0, 1):
        streams = [ExitStack(), ExitStack()]
        for stream in streams:
            stream.enter_context(transposed_weights(layer))
        streams.pop(last).close()
        assert operations(layer(x)) == usual - 1
        streams[0].close()
        assert operations(layer(x)) == usual
    recorders.remove()


def test_layers_that_left_a_model_or_lost_their_weight_do_no_harm() -> None:
    model: Any = build("llama")
    model.unused = nn.Linear(4, 4)
    generator = SpeculativeGenerator(model, byte_tokenizer(), draft=None)
    left = layers_of(model)

    def used(path: str, module: Any) -> bool:
        return path != "unused" and hasattr(module, "to_quantized")

    nn.quantize(model, group_size=32, bits=8, class_predicate=used)
    assert [id(layer) for layer in layers_of(model)] == [id(model.unused)]
    for layer in left:
        del layer["weight"]
    assert len(generator.generate(PROMPT, max_tokens=4, stop_tokens=()).tokens) == 4


def tokens(generator: SpeculativeGenerator) -> list[int]:
    return generator.generate(PROMPT, max_tokens=12, stop_tokens=()).tokens


def test_a_stream_takes_the_weights_as_they_are_when_it_begins() -> None:
    def change(model: Any) -> None:
        for layer in model.layers:
            change_weight(layer.self_attn.o_proj)

    model, fresh = build("llama"), build("llama")
    generator = SpeculativeGenerator(model, byte_tokenizer())
    before = tokens(generator)
    change(model)
    change(fresh)
    ids = mx.array([PROMPT])
    assert model(ids).tolist() == fresh(ids).tolist()
    expected = tokens(SpeculativeGenerator(fresh, byte_tokenizer()))
    assert tokens(generator) == expected != before


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text"])
def test_target_and_draft_have_their_views_while_a_stream_runs(name: str) -> None:
    models: list[Any] = [build(name), build("llama", seed=1)]
    ids = mx.array([[1]])

    def fewer(others: list[Any]) -> list[int]:
        return [u - operations(m(ids)) for u, m in zip(usual, others, strict=True)]

    usual = [operations(model(ids)) for model in models]
    every = [len(layers_of(model)) for model in models]
    generator = SpeculativeGenerator(models[0], byte_tokenizer(), draft=models[1])
    assert fewer(models) == [0, 0]
    stream = generator.stream(PROMPT, max_tokens=5, draft_length=0)
    assert fewer(models) == [0, 0]
    next(stream)
    assert fewer(models) == every
    assert fewer(deepcopy(models)) == [0, 0]
    stream.close()
    assert fewer(models) == [0, 0]


def test_layers_that_are_multiplied_together_have_views_in_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("cuda_serves", "kernels_compile"):
        monkeypatch.setattr(few_rows, name, lambda: True)
    model, ids = build("llama"), mx.array([[1]])
    usual = operations(model(ids))
    recorders = ModelHooks(model)
    with transposed_weights(model):
        round_hooks.turn(on=True)
        try:
            within = operations(model(ids))
        finally:
            round_hooks.turn(on=False)
        assert within == operations(model(ids)) == usual - len(layers_of(model))
    recorders.remove()
