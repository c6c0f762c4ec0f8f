"""Models are refused unless their parts are found with certainty."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama

from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import HiddenStates, find_parts
from mlx_speculation.models.introspect.parts import Parts
from support.models import census
from support.models.census import build_from
from support.models.copies import hooked
from support.models.tiny_models import TINY_MODELS, build

LAYERS: dict[str, Any] = {"layers": (0,)}


def altered(module: nn.Module, call: Any) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def refused(model: nn.Module, match: str, **options: Any) -> Parts:
    with pytest.raises(UnsupportedModelError, match=match):
        HiddenStates(model, **options)
    return find_parts(model)


def test_the_parts_of_a_model_are_the_modules_that_have_the_names() -> None:
    model = build("llama", layers=4)
    parts = find_parts(model)
    path = {id(module): path for path, module in model.named_modules()}
    assert [path[id(layer)] for layer in parts.layers] == [
        f"model.layers.{index}" for index in range(4)
    ]
    assert path[id(parts.norm)] == "model.norm"
    assert path[id(parts.trunk)] == "model"
    assert path[id(parts.entry)] == "model.layers.0"
    assert path[id(parts.embedding)] == "model.embed_tokens"
    assert path[id(parts.output)] == "lm_head"
    assert (parts.dim, parts.norm_calls) == (64, 1)
    assert parts.bare
    assert not parts.tied
    assert not parts.missing


def test_tied_capped_and_inner_heads_are_distinguished() -> None:
    by_name = {
        name: find_parts(census.build(name))
        for name in ("gemma", "gemma2", "gpt_neox", "minicpm", "talkie", "gemma3n")
    }
    assert {name for name, parts in by_name.items() if parts.tied} == {
        "gemma", "gemma2", "gemma3n"
    }  # fmt: skip
    assert {name for name, parts in by_name.items() if parts.bare} == {
        "gemma", "gpt_neox"
    }  # fmt: skip
    assert {name for name, parts in by_name.items() if parts.trunk is None} == {
        "gpt_neox", "gemma3n"
    }  # fmt: skip
    assert {name for name, parts in by_name.items() if parts.output is None} == {
        "minicpm", "talkie"
    }  # fmt: skip


def test_looking_for_the_parts_evaluates_no_weights() -> None:
    args = llama.ModelArgs.from_dict(
        TINY_MODELS["llama"].args | {"hidden_size": 1024, "head_dim": 256}
    )
    model = llama.Model(args)
    before = mx.get_active_memory()
    assert not find_parts(model).missing
    assert mx.get_active_memory() - before < 100_000  # a matrix has 4,000,000 bytes


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("gemma3n", LAYERS, r"its layers: layer 0 does not return one hidden state"),
        ("deepseek_v41", LAYERS, r"not return .* \(1, 2, 64\), but a tuple of an arr"),
        ("nanbeige", LAYERS, r"has 2 modules, .* in the order \[0, 1, 0, 1\]"),
        ("iquestloopcoder", LAYERS, r"2 modules, .* in the order \[\]"),
    ],
)
def test_layers_of_several_streams_or_in_a_loop_are_refused(
    name: str, options: dict[str, Any], match: str
) -> None:
    model = census.build(name)
    refused(model, match, **options)
    HiddenStates(model, before_norm=True, after_norm=True).remove()


def test_layers_whose_state_is_kept_in_blocks_are_refused() -> None:
    """The norm of kimi_k3 gets a mix of residual blocks, not the last layer's state."""
    row = census.BUILT["kimi_k3"]
    assert row.args is not None
    text = row.args["text_config"] | {"attn_res_block_size": 2}
    model = build_from("kimi_k3", row.args | {"text_config": text})
    refused(model, "the RMSNorm after layer 3 is not given what that layer", **LAYERS)
    HiddenStates(model, before_norm=True, after_norm=True).remove()


class Halves(llama.TransformerBlock):
    """A layer that returns its state in two parts."""

    def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
        whole = x[0] + x[1] if isinstance(x, tuple) else x
        hidden = super().__call__(whole, mask, cache)
        return hidden / 2, hidden / 2


class Summed(nn.Module):
    norm: nn.Module

    def __call__(self, x: Any) -> Any:
        return self.norm(x[0] + x[1])


def test_layers_that_return_two_states_are_refused() -> None:
    model = build("llama", layers=4)
    for layer in model.model.layers:
        layer.__class__ = Halves
    summed: Any = Summed()  # type: ignore[no-untyped-call]
    summed.norm = model.model.norm
    model.model.norm = summed
    refused(model, "layer 0 does not return one hidden state .* a tuple", **LAYERS)
    HiddenStates(model, before_norm=True, after_norm=True).remove()


def test_what_the_trunk_does_after_the_last_layer_is_its_norm_without_weights() -> None:
    model = build("llama", layers=4)
    model.model.norm = nn.Identity()
    altered(model.model.norm, lambda self, x: mx.fast.rms_norm(x, None, 1e-5))
    parts = find_parts(model)
    assert (parts.norm, parts.trunk, parts.missing) == (None, model.model, {})


def test_a_model_without_a_norm_and_without_a_trunk_is_refused() -> None:
    model = build("llama", layers=4)
    model.model.norm = nn.Identity()
    altered(model, lambda self, ids, cache=None: self.lm_head(flat(self, ids)))
    parts = refused(model, "its norm: no call of a norm was .* no module around the la")
    assert set(parts.missing) == {"norm", "layers", "entry", "embedding"}


def flat(model: Any, ids: mx.array) -> mx.array:
    """Return the output of the last layer, without a forward of the trunk."""
    hidden: mx.array = model.model.embed_tokens(ids)
    for layer in model.layers:
        hidden = layer(hidden, "causal", None)
    return hidden


def test_a_module_that_goes_on_after_the_norm_is_refused() -> None:
    model = build("llama", layers=4)
    trunk = type(model.model).__call__
    altered(model.model, lambda self, *args: 2 * trunk(self, *args))
    refused(model, "a RMSNorm. No module .* its result, and the head does not take it")


def test_what_a_model_does_after_the_trunk_belongs_to_the_head() -> None:
    model = build("llama", layers=4)
    ids = mx.array([[4, 5, 6]])
    plain = model(ids)
    altered(
        model,
        lambda self, ids, cache=None: -self.lm_head(2 * self.model(ids, cache)),
    )
    taps = HiddenStates(model, after_norm=True)
    with taps.collect() as states:
        logits = model(ids)
    assert mx.array_equal(taps.head(states.after_norm), logits)
    assert mx.array_equal(logits, -2 * plain)
    taps.remove()


def test_a_model_that_writes_into_hidden_states_changes_only_its_own() -> None:
    model = build("llama", layers=4)
    ids = mx.array([[4, 5, 6]])
    expected = model.model(ids)

    def doubling(self: Any, ids: mx.array, cache: Any = None) -> mx.array:
        hidden: mx.array = self.model(ids, cache)
        hidden *= 2
        logits: mx.array = self.lm_head(hidden)
        return logits

    altered(model, doubling)
    taps = HiddenStates(model, after_norm=True)
    with taps.collect() as states:
        logits = model(ids)
    assert mx.array_equal(taps.head(states.after_norm), logits)
    assert mx.array_equal(states.after_norm, expected)
    taps.remove()


def test_other_readers_of_the_hidden_state_are_not_taken_for_the_head() -> None:
    model = build("llama", layers=4)
    model.value = nn.Linear(64, 1)
    altered(model, with_value)
    assert find_parts(model).output is model.lm_head
    model.value = nn.Linear(64, 256)
    parts = find_parts(model)
    assert (parts.output, parts.bare, parts.missing) == (None, False, {})


def with_value(self: Any, ids: mx.array, cache: Any = None) -> mx.array:
    hidden = self.model(ids, cache)
    self.value(hidden)
    logits: mx.array = self.lm_head(hidden)
    return logits


def test_two_norms_after_the_layers_leave_the_last_one() -> None:
    """The last norm does not get the output of the last layer."""
    model = build("llama", layers=4)
    model.model.norm = nn.Sequential(nn.RMSNorm(64), nn.LayerNorm(64))
    parts = refused(model, "the LayerNorm after layer 3 is not given what", **LAYERS)
    assert parts.norm is model.model.norm.layers[1]
    assert parts.trunk is model.model


def test_layers_that_are_called_in_another_order_are_refused() -> None:
    model = build("llama", layers=4)
    model.model.layers = model.model.layers[::-1]
    kind = type(model)
    model.__class__ = type(
        kind.__name__,
        (kind,),
        {"layers": property(lambda self: self.model.layers[::-1])},
    )
    refused(model, r"calls them in the order \[3, 2, 1, 0\]", **LAYERS)


def test_an_embedding_that_needs_more_than_the_ids_is_refused() -> None:
    taps = HiddenStates(census.build("longcat_flash_ngram"), layers=(0, 1))
    with pytest.raises(UnsupportedModelError, match="its embedding: 0 modules make"):
        taps.embed(mx.array([[1]]))
    assert taps.embed(mx.array([[1]]), scaled=True).shape == (1, 1, 64)
    taps.remove()


def test_one_of_two_tables_is_the_embedding_if_the_head_is_tied_to_it() -> None:
    """gemma4_text also has a table of inputs per layer, as wide as the embedding."""
    model = build("gemma4_text", layers=8)
    assert find_parts(model).embedding is model.model.embed_tokens
    model.tie_word_embeddings = False
    model.lm_head = nn.Linear(64, 256, bias=False)
    taps = HiddenStates(model)
    with pytest.raises(UnsupportedModelError, match="its embedding: 2 modules make"):
        taps.embed(mx.array([[1]]))
    taps.remove()


def test_the_layer_before_the_first_is_what_that_was_given() -> None:
    model, ids = build("llama", layers=2), mx.array([[4, 5, 6]])
    taps = HiddenStates(model, layers=(-1, 0))
    with taps.collect() as states:
        model(ids)
    assert mx.array_equal(states.layer(-1), model.model.embed_tokens(ids)).item()
    assert not mx.array_equal(states.layer(-1), states.layer(0)).item()
    taps.remove()


@pytest.mark.parametrize("index", [-2, 4, 100])
def test_a_layer_that_is_not_there_is_refused(index: int) -> None:
    model = build("llama", layers=4)
    with pytest.raises(InvalidRequestError, match=f"Layer {index} .* model has 4"):
        HiddenStates(model, layers=(0, index))
    assert not hooked(model)
