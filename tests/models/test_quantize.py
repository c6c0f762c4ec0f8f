"""Quantizing a draft: layers that change, layers that stay, and refusals."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation import InvalidRequestError
from mlx_speculation.models.quantize import (
    BITS,
    GROUP_SIZES,
    quantize_weights,
    weight_bytes,
)
from support.models.mtp_checkpoints import flat
from support.models.tiny_models import TINY_MODELS, build


@pytest.mark.parametrize("bits", BITS)
def test_weights_are_rounded_and_nothing_else_changes(bits: int) -> None:
    model, before = build("llama"), build("llama")
    count = quantize_weights(model, bits)
    layers = [m for _, m in model.named_modules() if isinstance(m, nn.QuantizedLinear)]
    embeddings = [
        m for _, m in model.named_modules() if isinstance(m, nn.QuantizedEmbedding)
    ]
    assert count == len(layers) + len(embeddings) > 12
    assert {layer.bits for layer in layers} == {bits}
    assert {layer.group_size for layer in layers} == {64}
    for path, value in flat(model).items():
        if "norm" in path:
            assert mx.array_equal(value, flat(before)[path])
    layer, old = model.layers[0].mlp.up_proj, before.layers[0].mlp.up_proj
    rounded = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, bits)
    step = np.array(mx.abs(layer.scales)).max()
    assert mx.abs(rounded - old.weight).max().item() <= step
    # A scale and a bias in float32 for 64 numbers add one bit to each number.
    assert 0.9 < weight_bytes(before) / weight_bytes(model) * (bits + 1) / 32 <= 1


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 48])
def test_the_group_size_fits_the_rows(columns: int) -> None:
    model = nn.Sequential(nn.Linear(columns, 8), nn.Linear(64, 8))
    quantize_weights(model, 4)
    fits = [size for size in GROUP_SIZES if columns % size == 0]
    layer = model.layers[0]
    assert isinstance(layer, nn.QuantizedLinear) == bool(fits)
    if fits:
        assert layer.group_size == fits[0]


def test_the_models_own_predicate_keeps_routers_precise() -> None:
    model = build("qwen3_next(moe)")
    quantize_weights(model, 3)
    bits = {
        p.split(".")[-1]: m.bits
        for p, m in model.named_modules()
        if "bits" in m.__dict__ or hasattr(m, "bits")
    }
    assert bits["gate"] == 8
    assert bits["lm_head"] == 3


def test_there_has_to_be_something_to_quantize() -> None:
    model = build("llama")
    quantize_weights(model, 4)
    with pytest.raises(InvalidRequestError, match="0 layers that can be quantized"):
        quantize_weights(model, 4)
    with pytest.raises(InvalidRequestError, match="0 layers"):
        quantize_weights(nn.Linear(48, 8), 4)


@pytest.mark.parametrize("bits", [0, 1, 7, 16, True, None, "4"])
def test_other_numbers_of_bits_are_refused(bits: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"is {bits!r}, but has to be one"):
        quantize_weights(build("llama"), bits)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_tiny_model_runs_quantized(name: str) -> None:
    model = build(name)
    quantize_weights(model, 4)
    logits = model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model))
    assert mx.isfinite(logits).all()
