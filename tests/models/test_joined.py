"""Layers with a common weight do what they did, and their weights are their own.

It is taken to be x86-64 with OpenBLAS here, whatever this machine is.

Faults that were made by hand, and found here: results go to the wrong layer; a bias is
forgotten; a weight that was replaced is not used; a result for something else is taken;
one that nobody asks for is computed again and again; single rows are joined; a second
generator joins again; half precision and gates are joined; weights are copied and not
views; a model that nobody has stays.
"""

import copy
import gc
import pickle
import re
import weakref
from io import StringIO
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.models import Lane, Recorders, in_round, joined, stand_ins
from mlx_speculation.models.in_round import rows_of_a_round
from mlx_speculation.models.instances import plain_class
from support.census import BUILT, build


@pytest.fixture(autouse=True)
def _serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (in_round, joined, stand_ins):
        monkeypatch.setattr(module, "x86_serves", lambda: True)
    for module in (in_round, stand_ins):
        monkeypatch.setattr(module, "cuda_serves", lambda: False)


def products(arrays: list[mx.array]) -> int:
    """Return how many products arrays wait for."""
    text = StringIO()
    mx.export_to_dot(text, *arrays)
    return len(re.findall(r'label ?= ?"(?:Matmul|AddMM)"', text.getvalue()))


def rows_of(model: nn.Module, rows: list[int]) -> tuple[mx.array, int]:
    """Return the logits of a round's rows behind a prompt, and their products."""
    lane = Lane(model, make_prompt_cache(model))
    lane.feed(list(range(1, 20)))
    with lane.begin() as lane_round:
        logits = lane_round.forward(mx.array(rows))
        count = products([logits])
        mx.eval(logits)
    return logits, count


@pytest.mark.parametrize("name", sorted(BUILT))
def test_a_model_computes_what_it_did(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    held: Any = tree_flatten(model.parameters())
    before = {path: np.array(array) for path, array in held}
    kinds = [type(module) for module in model.modules()]
    with monkeypatch.context() as patch:  # all other stand-ins
        patch.setattr(joined, "x86_serves", lambda: False)
        recorders = Recorders(model)
        wanted, _ = rows_of(model, [201, 7, 96, 255, 31])
        recorders.remove()
    recorders = Recorders(model)
    found, _ = rows_of(model, [201, 7, 96, 255, 31])
    recorders.remove()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert [type(module) for module in model.modules()] == kinds
    held = tree_flatten(model.parameters())
    after = dict(held)
    assert after.keys() == before.keys()
    for path, array in before.items():
        assert np.array_equal(array, after[path]), path


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_there_are_fewer_products(name: str) -> None:
    """Three of queries, keys and values become one in every layer."""
    model: Any = build(name)
    attentions = [m for m in model.modules() if "q_proj" in m and "v_proj" in m]
    mixers = [m for m in model.modules() if "in_proj_qkv" in m]
    less = 2 * len(attentions) + 3 * len(mixers)
    rows = [201, 7, 96]
    usual, single = rows_of(model, rows)[1], rows_of(model, rows[:1])[1]
    recorders = Recorders(model)
    assert rows_of(model, rows)[1] == usual - less
    assert rows_of(model, rows[:1])[1] == single
    recorders.remove()
    assert rows_of(model, rows)[1] == usual
    assert attentions
    assert bool(mixers) == (name == "qwen3_5")


def test_projections_into_a_recurrent_layer_are_one_product() -> None:
    model: Any = build("qwen3_5")
    mixers = [m for m in model.modules() if "in_proj_qkv" in m]
    assert mixers
    x = mx.random.normal((1, 3, mixers[0].in_proj_qkv.weight.shape[1]))
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    wanted = [mixers[0][name](x) for name in names]
    recorders = Recorders(model)
    with rows_of_a_round(3):
        found = [mixers[0][name](x) for name in names]
    assert products(found) == 1
    recorders.remove()
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


class Fed(nn.Module):
    """Queries, keys, gates; `feed` says what keys are fed."""

    __module__ = "mlx_lm.models.fed"

    def __init__(self, dtype: mx.Dtype = mx.float32, width: int = 16) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.q_proj = nn.Linear(16, 8, bias=False)
        self.k_proj = nn.Linear(width, 4, bias=True)
        self.gate_proj = nn.Linear(16, 8, bias=False)
        self.up_proj = nn.Linear(16, 8, bias=False)
        self.set_dtype(dtype)
        self.feed = "same"

    def __call__(self, x: mx.array) -> list[mx.array]:
        if self.feed == "one":
            return [self.q_proj(x)]
        width = self.k_proj.weight.shape[-1]
        other = x if width == 16 else x[..., :width]
        queries = self.q_proj(x)
        keys = self.k_proj(x + 1 if self.feed == "other" else other)
        return [queries, keys, self.gate_proj(x), self.up_proj(x)]


def check(model: Fed, x: mx.array) -> int:
    """Compare a round with what the layers do by themselves; return its products."""
    wanted = model(x)
    with rows_of_a_round(x.shape[1]):
        found = model(x)
    count = products(found)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            one.astype(mx.float32), other.astype(mx.float32), rtol=1e-2, atol=1e-5
        )
    return count


def rows(count: int = 3, dtype: mx.Dtype = mx.float32) -> mx.array:
    made: mx.array = mx.random.normal((1, count, 16)).astype(dtype)
    mx.eval(made)
    return made


def test_gates_and_single_rows_are_multiplied_one_by_one() -> None:
    model = Fed()
    recorders = Recorders(model)
    assert check(model, rows()) == 3
    assert check(model, rows(1)) == 4
    assert products(model(rows())) == 4  # outside of a round
    recorders.remove()
    assert check(model, rows()) == 4
    assert type(model.q_proj) is plain_class(model.q_proj)


@pytest.mark.parametrize(
    ("more", "dtype"), [({"dtype": mx.bfloat16}, mx.bfloat16), ({"width": 8}, None)]
)
def test_other_dtypes_and_widths_are_not_joined(more: Any, dtype: Any) -> None:
    model = Fed(**more)
    recorders = Recorders(model)
    assert check(model, rows(dtype=dtype or mx.float32)) == 4
    assert type(model.q_proj) is plain_class(model.q_proj)
    recorders.remove()


def test_rows_of_another_dtype_are_not_joined() -> None:
    model = Fed()
    recorders = Recorders(model)
    assert check(model, rows(dtype=mx.bfloat16)) == 4
    recorders.remove()


def test_quantized_layers_and_adapters_are_not_joined() -> None:
    from mlx_lm.tuner.lora import LoRALinear

    model = Fed()
    model.k_proj = LoRALinear.from_base(model.k_proj)
    recorders = Recorders(model)
    assert type(model.q_proj) is plain_class(model.q_proj)
    recorders.remove()


def test_layers_of_other_packages_are_not_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fed, "__module__", "somebody.elses")
    model = Fed()
    recorders = Recorders(model)
    assert check(model, rows()) == 4
    recorders.remove()


def test_what_is_fed_something_else_is_multiplied_by_itself() -> None:
    model = Fed()
    recorders = Recorders(model)
    model.feed = "other"
    # The common product is still there for the queries; then nobody asks for the rest.
    assert check(model, rows()) == 4
    model.feed = "same"
    assert check(model, rows()) == 4
    recorders.remove()


def test_a_result_that_nobody_asks_for_is_not_computed_again() -> None:
    model = Fed()
    recorders = Recorders(model)
    model.feed = "one"
    x = rows()
    check(model, x)
    model.feed = "same"
    assert check(model, x) == 4
    recorders.remove()


def replaced(layer: Any) -> None:
    layer.weight = layer.weight * 2


def scaled(layer: Any) -> None:
    layer.weight *= 2


def one_row_of(layer: Any) -> None:
    layer.weight[0] = 0.0


def turned(layer: Any) -> None:
    weight = layer.weight  # in the same place, and shaped alike
    layer.weight = mx.as_strided(weight, weight.shape, (1, weight.shape[0]))


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
@pytest.mark.parametrize("change", [replaced, scaled, one_row_of, turned])
@pytest.mark.parametrize("hooked", [True, False])
def test_a_weight_that_was_replaced_or_changed_is_used(
    name: str, change: Any, hooked: bool
) -> None:
    model = Fed()
    recorders = Recorders(model)
    if not hooked:
        recorders.remove()
    change(model[name])
    assert check(model, rows()) == 4
    again = Recorders(model)  # which joins the new ones
    assert check(model, rows()) == 3
    again.remove()
    recorders.remove()


def test_another_generator_joins_nothing_again() -> None:
    model = Fed()
    first = Recorders(model)
    weights = [model.q_proj.weight, model.k_proj.weight]
    second = Recorders(model)
    first.remove()
    second.remove()
    third = Recorders(model)
    assert model.q_proj.weight is weights[0]
    assert model.k_proj.weight is weights[1]
    assert check(model, rows()) == 3
    third.remove()


def test_what_mlx_has_traced_is_still_joined() -> None:
    """As a compiled draft is: its weights are other objects afterwards."""
    model = Fed()
    recorders = Recorders(model)

    def step(x: mx.array) -> Any:
        with rows_of_a_round():
            return model(x)

    x = rows(2)
    compiled = mx.compile(step, inputs=model.state)
    for one, other in zip(compiled(x), step(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    held: Any = model.q_proj
    common = held._joined
    assert check(model, rows()) == 3
    recorders.remove()
    again = Recorders(model)
    assert check(model, rows()) == 3
    assert held._joined is common
    again.remove()


@pytest.mark.parametrize("seen_by", ["a round", "a generator"])
def test_what_was_replaced_is_let_go_of(seen_by: str) -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("memory is counted where it is computed: on a CPU")
    model: Any = Fed()
    model.q_proj.weight = mx.random.normal((4096, 16))
    recorders = Recorders(model)
    model.q_proj.weight = mx.random.normal((8, 16))
    model.k_proj.weight = mx.random.normal((4, 16))
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    if seen_by == "a round":
        with rows_of_a_round(3):
            mx.eval(model(rows()))
    else:
        model.set_dtype(mx.bfloat16)
        Recorders(model).remove()
    assert before - mx.get_active_memory() > 200_000
    recorders.remove()


def test_weights_take_no_more_memory() -> None:
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("memory is counted where it is computed: on a CPU")
    model: Any = Fed()
    model.q_proj.weight = mx.random.normal((600, 512))
    model.k_proj.weight = mx.random.normal((300, 512))
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    Recorders(model).remove()
    assert mx.get_active_memory() - before < 4096


def test_a_model_that_nobody_has_is_gone() -> None:
    model = Fed()
    Recorders(model).remove()
    gone = weakref.ref(model.q_proj)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_a_copy_has_weights_of_its_own(way: str) -> None:
    model = nn.Linear(4, 3)
    other = nn.Linear(4, 2)
    joined.Joined([model, other])
    again = copy.deepcopy(model) if way == "copy" else pickle.loads(pickle.dumps(model))
    assert again._joined is None
    assert mx.array_equal(again.weight, model.weight)
