"""An output layer for some ids makes the logits of those ids only."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.errors import UnsupportedModelError
from mlx_speculation.models import (
    HiddenStates,
    ReducedEnds,
    ReducedOutput,
    find_parts,
    quantize_weights,
)
from mlx_speculation.models.introspect.reduced_output import sliced
from support.covering import covering
from support.models import census
from support.models.tiny_models import TINY_MODELS, build

IDS = [200, 3, 17, 255, 0]
TOKENS = mx.array([[7, 200, 31, 5]])
# Models whose output layer is their embedding, or that change the layer's logits.
TIED = ("gemma3_text", "gemma4_text", "recurrent_gemma")


def logits(model: Any) -> mx.array:
    result: mx.array = model(TOKENS, cache=make_prompt_cache(model))
    return result


def close(some: mx.array, whole: mx.array) -> bool:
    return bool(mx.allclose(some, whole, atol=1e-4, rtol=1e-4))


@pytest.mark.parametrize(("name", "quantized"), covering(TINY_MODELS, (False, True)))
def test_the_logits_are_the_models_at_those_ids(name: str, quantized: bool) -> None:
    model = build(name)
    if quantized:
        quantize_weights(model, 4)
    whole = logits(model)
    reduced = ReducedOutput(find_parts(model), IDS)
    with reduced.only():
        some = logits(model)
    assert some.shape == (1, 4, len(IDS))
    assert close(some, whole[..., mx.array(IDS)])
    assert mx.array_equal(logits(model), whole)  # restored after the block


@pytest.mark.parametrize("name", ["llama", *TIED])
def test_ends_of_a_target_are_reduced_on_one_side(name: str) -> None:
    model = build(name)
    taps = HiddenStates(model, after_norm=True)
    ends = ReducedEnds(taps, IDS)
    hidden = mx.random.normal((1, 3, 64), key=mx.random.key(1))
    assert close(ends.head(hidden), taps.head(hidden)[..., mx.array(IDS)])
    assert mx.array_equal(ends.embed(TOKENS), taps.embed(TOKENS))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_rows_come_with_their_bias_and_scales(bias: bool, quantized: bool) -> None:
    layer: Any = nn.Linear(64, 9, bias=bias)
    if quantized:
        layer = layer.to_quantized(group_size=32, bits=3)
    x = mx.random.normal((2, 64), key=mx.random.key(0))
    some: Any = sliced(layer, mx.array([8, 0, 3], mx.uint32))
    assert close(some(x), layer(x)[:, mx.array([8, 0, 3])])


def test_other_output_layers_are_refused() -> None:
    model: Any = build("llama")

    class Own(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.table = inner.weight

        def __call__(self, x: mx.array) -> mx.array:
            return x @ self.table.T

    model.lm_head = Own(model.lm_head)
    with pytest.raises(UnsupportedModelError, match="its output layer is a Own"):
        ReducedOutput(find_parts(model), IDS)


class Cleared(nn.Module):
    """A model that changes each logit depending on the index of the logit."""

    def __init__(self, inner: Any, wide: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner, self.wide = inner, wide

    @property
    def layers(self) -> Any:
        return self.inner.layers

    def make_cache(self) -> Any:
        return make_prompt_cache(self.inner)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        scores: mx.array = self.inner(tokens, cache=cache)
        if self.wide:
            return scores + mx.arange(256)
        return scores * (mx.arange(scores.shape[-1]) > 2)


@pytest.mark.parametrize("wide", [True, False])
def test_models_that_do_something_by_the_place_of_a_logit_are_refused(
    wide: bool,
) -> None:
    with pytest.raises(UnsupportedModelError, match="of a part of its vocabulary"):
        ReducedOutput(find_parts(Cleared(build("llama"), wide)), IDS)


def test_a_model_that_writes_logits_by_their_ids_is_refused() -> None:
    """phi3small writes past the end of reduced logits; mlx does not check bounds."""
    with pytest.raises(UnsupportedModelError, match="by their ids"):
        ReducedOutput(find_parts(census.build("phi3small")), IDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(census.BUILT))
def test_every_architecture_is_reduced_or_refused(name: str) -> None:
    model = census.build(name)
    whole = logits(model)
    try:
        reduced = ReducedOutput(find_parts(model), IDS)
    except UnsupportedModelError:
        return
    with reduced.only():
        assert close(logits(model), whole[..., mx.array(IDS)])
