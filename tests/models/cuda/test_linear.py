"""Linear layers and attention of every model call the CUDA kernels in rounds.

CUDA is simulated: stock operations replace the kernels. test_cuda_kernels.py tests the
kernels on a GPU.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers import distributed
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_speculation.errors import DraftNotice
from mlx_speculation.models import Lane, ModelHooks, round_context
from mlx_speculation.models.cpu import registration as cpu_registration
from mlx_speculation.models.cuda import attention as cuda_attention
from mlx_speculation.models.cuda import gated_delta, linear, registration
from mlx_speculation.models.cuda.available import kernels_compile
from mlx_speculation.models.cuda.matmul import Weight
from mlx_speculation.models.instance_hooks import plain_class
from mlx_speculation.models.ops.latent_attention import ATTENTIONS
from mlx_speculation.models.ops.round_ops import round_op_hooks
from mlx_speculation.models.round_context import rows_of_a_round
from support.covering import others_slow
from support.models.census import BUILT, FEW, build

pytestmark = pytest.mark.usefixtures("on_the_cpu")

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(21)]
ROWS = [201, 7, 96, 255, 31]


@pytest.fixture
def calls() -> list[int]:
    """Return a list that gets each kernel call's number of weight matrices."""
    return []


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> list[str]:
    """Replace the kernels by stock operations; return the names of called kernels."""
    seen: list[str] = []

    def products(x: mx.array, weights: Sequence[Weight]) -> list[mx.array]:
        calls.append(len(weights))
        assert len({weight.group for weight in weights}) == 1
        results = []
        for (weight, *more), group in weights:
            seen.append("four bits" if group else "half")
            if group:
                scales, biases = more
                result = mx.quantized_matmul(
                    x, weight, scales, biases, transpose=True, group_size=group, bits=4
                )
            else:
                result = x @ weight.T
            results.append(result)
        return results

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        **_: bool,
    ) -> mx.array:
        seen.append("attention")
        for array in (keys, values):  # the layout that the kernel requires
            mx.eval(array)
            strides: Any = memoryview(cast(Any, array)).strides
            assert strides[-1] == array.itemsize
            assert not any(n % (array.shape[-1] * array.itemsize) for n in strides[:-1])
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask
        )

    monkeypatch.setattr(round_context, "cuda_serves", lambda: True)
    for module in (linear, registration):
        monkeypatch.setattr(module, "cuda_serves", lambda: True)
        monkeypatch.setattr(module, "kernels_compile", lambda: True)
    monkeypatch.setattr(
        gated_delta, "_run", lambda *inputs: list(gated_delta_ops(*inputs))
    )
    monkeypatch.setattr(linear, "products", products)
    monkeypatch.setattr(cuda_attention, "attention", attention)
    monkeypatch.setattr(cuda_attention, "DIMENSIONS", range(1, 1024))
    return seen


def rows_of(model: nn.Module, *, hooked: bool) -> mx.array:
    recorders = ModelHooks(model) if hooked else None
    try:
        lane = Lane(model, make_prompt_cache(model))
        lane.feed(PROMPT)
        with lane.begin() as lane_round:
            output = lane_round.forward(mx.array(ROWS))
            mx.eval(output)
    finally:
        if recorders is not None:
            recorders.remove()
    return output


@pytest.mark.parametrize("name", others_slow(BUILT, FEW))
def test_a_model_computes_what_it_did(
    name: str, kernel_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "HALVES", [mx.float32])  # the dtype of the tiny models
    monkeypatch.setattr(cuda_attention, "HALVES", [mx.float32])
    model = build(name)
    kinds = [type(module) for module in model.modules()]
    wanted = rows_of(model, hooked=False)
    assert not kernel_calls
    rows = rows_of(model, hooked=True)
    assert mx.allclose(rows, wanted, rtol=1e-3, atol=1e-3)
    assert [type(module) for module in model.modules()] == kinds
    assert "half" in kernel_calls or not any(
        plain_class(module) is nn.Linear and module.weight.shape[-1] % 32 == 0
        for module in model.modules()
    )


@pytest.mark.parametrize("home", sorted({home for home, _ in ATTENTIONS}))
def test_attention_over_latents_keeps_the_way_of_its_own(
    home: str, kernel_calls: list[str]
) -> None:
    model = build(home.removeprefix("mlx_lm.models."))
    hooked = [plain_class(module) for module, _ in round_op_hooks(model)]
    assert not {(kind.__module__, kind.__name__) for kind in hooked} & ATTENTIONS


def test_prompts_and_single_rows_keep_the_products_of_mlx(
    kernel_calls: list[str],
) -> None:
    model = build("llama")
    model.set_dtype(mx.bfloat16)
    recorders = ModelHooks(model)
    lane = Lane(model, make_prompt_cache(model))
    lane.feed(PROMPT)
    with lane.begin(whole=True) as plain_step:
        mx.eval(plain_step.forward(mx.array([5])))
    with lane.begin() as first_draft:
        mx.eval(first_draft.forward(mx.array([5])))
    assert kernel_calls == []
    with lane.begin() as verify:
        verify.forward(mx.array([5, 6]))
    assert {"half", "attention"} == set(kernel_calls)
    recorders.remove()


@pytest.mark.parametrize("rows", [1, 2, 32, 33])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("width", [64, 80])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_asks_where_the_kernel_serves(
    rows: int, dtype: mx.Dtype, width: int, bias: bool, kernel_calls: list[str]
) -> None:
    layer = nn.Sequential(nn.Linear(width, 48, bias=bias))
    layer.set_dtype(dtype)
    x = mx.random.normal((1, rows, width)).astype(dtype)
    wanted = layer(x)
    recorders = ModelHooks(layer)
    with rows_of_a_round():
        output = layer(x)
    serves = 1 < rows <= 32 and dtype != mx.float32 and width % 32 == 0
    assert kernel_calls == (["half"] if serves else [])
    assert mx.allclose(output, wanted, rtol=0.02, atol=0.02)
    assert layer(x).shape == wanted.shape
    assert len(kernel_calls) == int(serves)  # no kernel outside of a round
    recorders.remove()


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sharding", ["all-to-sharded", "sharded-to-all"])
def test_a_ranks_part_of_a_layer_asks_and_is_added_up(
    sharding: str,
    bias: bool,
    bits: int | None,
    kernel_calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks with equal parts are simulated: the sum doubles this rank's part."""
    whole: Any = nn.Sequential(nn.Linear(64, 48, bias=bias))
    whole.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(whole, group_size=32, bits=bits)
    layer = nn.Sequential(distributed.shard_linear(whole.layers[0], sharding))
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: 2 * x)
    x = mx.random.normal((1, 5, 64)).astype(mx.bfloat16)
    wanted = layer(x)
    recorders = ModelHooks(layer)
    with rows_of_a_round():
        output = layer(x)
    assert kernel_calls == ["half" if bits is None else "four bits"]
    assert mx.allclose(output, wanted, rtol=0.02, atol=0.02)
    recorders.remove()
    assert type(layer.layers[0]).__call__ is plain_class(layer.layers[0]).__call__


@pytest.mark.parametrize("bits", [None, 4])
def test_layers_that_are_fed_the_same_are_multiplied_together(
    bits: int | None, kernel_calls: list[str], calls: list[int]
) -> None:
    model = build("llama")
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    wanted = rows_of(model, hooked=False)
    rows = rows_of(model, hooked=True)
    layers = len(cast(Any, model).layers)
    assert calls == [3, 1, 2, 1] * layers + [1]
    assert mx.allclose(rows, wanted, rtol=0.05, atol=0.05)


class Fed(nn.Module):
    """Query and key projections, whose inputs `feed` selects."""

    __module__ = "mlx_lm.models.fed"

    def __init__(self, feed: str, **more: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.q_proj = nn.Linear(64, 32, bias=False)
        self.k_proj = nn.Linear(more.get("width", 64), 16, bias=True)
        self.feed = feed
        self.set_dtype(mx.bfloat16)
        for name, group in more.get("groups", {}).items():
            self[name] = nn.QuantizedLinear.from_linear(self[name], group, 4)

    def __call__(self, x: mx.array) -> list[mx.array]:
        if self.feed == "one":
            return [self.q_proj(x)]
        other = x[..., : self.k_proj.weight.shape[-1]] if self.feed == "less" else x
        return [self.q_proj(x), self.k_proj(x + 1 if self.feed == "other" else other)]


@pytest.mark.parametrize(
    ("feed", "more", "wanted_calls"),
    [
        ("same", {}, [2, 2]),
        ("one", {}, [2, 1]),  # the second call leaves out the unused key projection
        ("other", {}, [2, 1, 1, 1]),
        ("less", {"width": 32}, [1, 1, 1, 1]),
        ("same", {"groups": {"k_proj": 32}}, [1, 1, 1, 1]),
        ("same", {"groups": {"q_proj": 32, "k_proj": 32}}, [2, 2]),
        ("same", {"groups": {"q_proj": 64, "k_proj": 32}}, [1, 1, 1, 1]),
    ],
)
def test_layers_that_are_fed_something_else_do_it_by_themselves(
    feed: str,
    more: Any,
    wanted_calls: list[int],
    kernel_calls: list[str],
    calls: list[int],
) -> None:
    model = Fed(feed, **more)
    xs = [mx.random.normal((1, 5, 64)).astype(mx.bfloat16) for _ in range(2)]
    wanted = [model(x) for x in xs]
    recorders = ModelHooks(model)
    for x, each in zip(xs, wanted, strict=True):
        with rows_of_a_round():
            products = model(x)
        for one, other in zip(products, each, strict=True):
            assert mx.allclose(one, other, rtol=0.05, atol=0.05)
    assert calls == wanted_calls
    recorders.remove()
    assert type(model.q_proj) is plain_class(model.q_proj)


def test_layers_of_other_packages_are_multiplied_one_by_one(
    kernel_calls: list[str], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fed, "__module__", "somebody.elses")
    model = Fed("same")
    recorders = ModelHooks(model)
    with rows_of_a_round():
        model(mx.ones((1, 5, 64), mx.bfloat16))
    assert calls == [1, 1]
    recorders.remove()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding])
def test_a_quantized_layer_asks_with_what_it_holds(
    bits: int, group: int, kind: Any, kernel_calls: list[str]
) -> None:
    model = nn.Sequential(kind(256, 48) if kind is nn.Linear else kind(48, 256))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=group, bits=bits)
    layer: Any = model.layers[0]
    ask = layer if kind is nn.Linear else lambda x: layer.as_linear(x)
    x = mx.random.normal((2, 4, 256)).astype(mx.bfloat16)
    wanted = ask(x)
    recorders = ModelHooks(model)
    with rows_of_a_round():
        product = ask(x)
    assert kernel_calls == (["four bits"] if bits == 4 else [])
    assert mx.array_equal(product, wanted)
    with rows_of_a_round(), pytest.raises(ValueError, match="shape"):
        ask(x[..., :128])  # mlx raises; no kernel reads past the input
    assert len(kernel_calls) == int(bits == 4)
    recorders.remove()


def test_other_ways_to_quantize_are_left_to_mlx(kernel_calls: list[str]) -> None:
    model = nn.Sequential(nn.Linear(256, 64, bias=False))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4")
    recorders = ModelHooks(model)
    with rows_of_a_round():
        mx.eval(model(mx.ones((1, 4, 256), mx.bfloat16)))
    assert kernel_calls == []
    recorders.remove()


def test_sinks_and_quantized_keys_are_left_to_mlx_lm() -> None:
    queries = mx.ones((1, 4, 3, 64), mx.bfloat16)
    keys = mx.ones((1, 2, 9, 64), mx.bfloat16)
    window = mx.ones((3, 9), mx.bool_)

    class Quantized:
        bits = 8

    serves = cuda_attention.serves
    assert serves(queries, keys, keys, None, "causal", None)
    assert serves(queries, keys, keys, None, window, None)
    assert serves(queries[:, :, :1], keys, keys, None, window[:1], None)
    assert not serves(queries[:, :, :1], keys, keys, None, None, None)
    two, rows = (mx.tile(x, [2, 1, 1, 1]) for x in (queries[:, :, :1], keys))
    assert serves(two, rows, rows, None, None, None)
    assert not serves(queries, keys, keys, None, "causal", mx.zeros((4,)))
    assert not serves(queries, keys, keys, Quantized(), "causal", None)
    assert not serves(queries, keys, keys[..., :32], None, "causal", None)
    assert not serves(queries, keys, keys, None, window.astype(mx.bfloat16), None)
    assert not serves(queries[:, :3], keys, keys, None, "causal", None)
    assert not serves(queries[..., :40], keys[..., :40], keys, None, None, None)
    every_head = mx.ones((1, 4, 3, 9), mx.bool_)
    assert not serves(queries, keys, keys, None, every_head, None)
    half = queries.astype(mx.float32)
    assert not serves(half, keys, keys, None, "causal", None)


@pytest.mark.skipif(mx.cuda.is_available(), reason="the kernels compile here")
def test_where_kernels_do_not_compile_mlx_multiplies_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_registration, "x86_serves", lambda: False)
    model = build("llama")
    recorders = ModelHooks(model)  # hooks as on a device without kernels
    kinds = [type(module) for module in model.modules()]
    recorders.remove()
    for module in (linear, registration):
        monkeypatch.setattr(module, "cuda_serves", lambda: True)
    kernels_compile.cache_clear()
    with pytest.warns(DraftNotice, match="could not compile"):
        recorders = ModelHooks(model)
    assert [type(module) for module in model.modules()] == kinds
    recorders.remove()
    kernels_compile.cache_clear()
