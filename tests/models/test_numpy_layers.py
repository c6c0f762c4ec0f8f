"""The layers of the numpy block drafters against those of mlx-lm."""

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import deepseek_v3, gemma4_text, qwen3, qwen3_next
from mlx_lm.models.rope_utils import initialize_rope
from numpy.testing import assert_allclose, assert_array_equal

from support.references.blocks.body import body_of
from support.references.blocks.eagle_layers import EagleHead
from support.references.blocks.layers import (
    add_attention,
    add_feed_forward,
    attend,
    keys_values,
    norm,
    queries,
    run_block,
)
from support.references.blocks.packagings import E4M3, canonical_weights, unpack_nvfp4
from support.references.blocks.primitives import Array, Config, Weights, attention
from support.references.blocks.rotary import rope_of
from support.references.tiny_blocks.tiny_dspark import tiny_dspark
from support.references.tiny_blocks.tiny_eagles import tiny_eagle3
from support.references.tiny_blocks.tiny_tensors import (
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    tiny_inputs,
)

ROWS = 12
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", SCALINGS)
def test_a_rotation_is_that_of_mlx_lm(kind: str, interleaved: bool) -> None:
    scaling = SCALINGS[kind]
    config = {"rope_theta": 10000.0, "rope_scaling": scaling}
    x = np.random.default_rng(0).normal(size=(ROWS, 4, 16))
    ours = rope_of(config, 16, partial=True, scaling=True, interleaved=interleaved)
    theirs = initialize_rope(16, 10000.0, interleaved, dict(scaling), 4096)
    rows = mx.array(x.transpose(1, 0, 2)[None], dtype=mx.float32)
    rotated = np.array(theirs(rows, offset=5))[0].transpose(1, 0, 2)
    assert_allclose(ours(x, 5 + np.arange(ROWS)), rotated, atol=2e-5)


def plain_layer(weights: Weights, config: Config, x: Array) -> Array:
    body = body_of(weights, config)
    seen = np.tril(np.ones((len(x), len(x)), dtype=bool))
    rows = norm(weights, "layers.0.input_layernorm", x, body)
    places = np.arange(len(x))
    mixed = attend(weights, "layers.0", rows, places, seen, body)
    x = add_attention(weights, "layers.0", x, mixed, body)
    return add_feed_forward(weights, "layers.0", x, body)


def loaded(module: Any, weights: Weights, prefix: str) -> Any:
    """The layer of mlx-lm with the tensors under `prefix`."""
    pairs = [
        (name.removeprefix(prefix), mx.array(tensor.astype(np.float32)))
        for name, tensor in weights.items()
        if name.startswith(prefix)
    ]
    return module.load_weights(pairs, strict=True)


def test_a_layer_is_qwen3s() -> None:
    drafter = tiny_dspark("deepspec")
    weights = canonical_weights(drafter.weights, drafter.config)
    fields = {
        **drafter.config,
        "model_type": "qwen3",
        "num_hidden_layers": 1,
    }
    block = qwen3.TransformerBlock(qwen3.ModelArgs.from_dict(fields))
    x = tiny_inputs(1, ROWS).hidden[0]
    theirs = loaded(block, weights, "layers.0.")(
        mx.array(x[None], dtype=mx.float32), mask="causal"
    )
    assert_allclose(
        plain_layer(weights, drafter.config, x), np.array(theirs)[0], atol=1e-4
    )


def test_a_qwen3_5_layer_is_qwen3_nexts() -> None:
    """Gated queries, a quarter of a head rotated, norms stored minus 1."""
    drafter = tiny_dspark("qwen3_5")
    weights = canonical_weights(drafter.weights, drafter.config)
    body = body_of(weights, drafter.config)
    x = tiny_inputs(1, ROWS).hidden[0]
    fields = {
        **drafter.config,
        "model_type": "qwen3_next",
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
    }
    for name in inspect.signature(qwen3_next.ModelArgs).parameters:
        fields.setdefault(name, 1)  # what attention does not read
    theirs = qwen3_next.Qwen3NextAttention(qwen3_next.ModelArgs.from_dict(fields))
    prefix = "layers.0.self_attn."
    shifted = {k: v + ("_norm" in k) for k, v in weights.items()}
    made = loaded(theirs, shifted, prefix)(
        mx.array(x[None], dtype=mx.float32), mask="causal"
    )
    seen = np.tril(np.ones((ROWS, ROWS), dtype=bool))
    ours = attend(weights, "layers.0", x, np.arange(ROWS), seen, body)
    assert_allclose(ours, np.array(made)[0], atol=1e-4)
    once = norm(weights, "layers.0.input_layernorm", x, body)
    size = np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6)
    assert_allclose(once, x / size * (1 + weights["layers.0.input_layernorm.weight"]))


def test_a_gemma_layer_is_gemma4s() -> None:
    drafter = tiny_dspark("gemma4")
    weights = canonical_weights(drafter.weights, drafter.config)
    fields = {
        **drafter.config,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    }
    layer = gemma4_text.DecoderLayer(gemma4_text.ModelArgs.from_dict(fields), 0)
    x = tiny_inputs(1, ROWS).hidden[0]
    theirs, _, _ = loaded(layer, weights, "layers.0.")(
        mx.array(x[None], dtype=mx.float32), mask="causal"
    )
    assert_allclose(
        plain_layer(weights, drafter.config, x), np.array(theirs)[0], atol=1e-4
    )


def test_latent_attention_is_deepseeks() -> None:
    drafter = tiny_eagle3("mla")
    scaling = {**SCALINGS["yarn with mscale"], "type": "yarn"}
    config = {**drafter.config, "rope_scaling": scaling}
    inputs = tiny_inputs(3, ROWS)
    head = EagleHead(drafter.weights, config, inputs.embeddings, inputs.lm_head)
    fields = {
        **config,
        "model_type": "deepseek_v3",
        "hidden_size": 2 * HIDDEN,  # what the projections read
        "rope_scaling": scaling,
    }
    theirs = deepseek_v3.DeepseekV3Attention(deepseek_v3.ModelArgs.from_dict(fields))
    prefix = "layers.0.self_attn."
    values = config["num_attention_heads"] * config["v_head_dim"]
    theirs.o_proj = nn.Linear(values, HIDDEN, bias=False)
    weights = dict(head.weights)
    both = weights.pop(f"{prefix}kv_b_proj.weight")
    both = both.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    nope = config["qk_nope_head_dim"]
    weights[f"{prefix}embed_q.weight"] = both[:, :nope].swapaxes(1, 2)
    weights[f"{prefix}unembed_out.weight"] = both[:, nope:]
    read = np.random.default_rng(3).normal(size=(ROWS, 2 * HIDDEN))
    mask = mx.array(np.tril(np.ones((ROWS, ROWS), dtype=bool)))
    made = loaded(theirs, weights, prefix)(
        mx.array(read[None], dtype=mx.float32), mask=mask
    )
    ours = head.mix("layers.0", read, np.arange(ROWS), None)
    assert_allclose(ours, np.array(made)[0], atol=1e-4)


def test_nvfp4_is_unpacked_as_mlx_does() -> None:
    weight = mx.array(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32))
    packed, scales, *_ = mx.quantize(weight, group_size=16, bits=4, mode="nvfp4")
    theirs = mx.dequantize(packed, scales, group_size=16, bits=4, mode="nvfp4")
    bytes_ = np.array(packed).view(np.uint8)
    ours = unpack_nvfp4(bytes_, np.array(scales), np.array(2.0))
    assert_allclose(ours, 2.0 * np.array(theirs.astype(mx.float32)), rtol=1e-6)


def test_packed_weights_are_near_those_they_were_made_from() -> None:
    drafter = tiny_dspark("nemotron")
    made = tiny_dspark("specforge")
    found = canonical_weights(drafter.weights, drafter.config)
    name = "layers.1.mlp.up_proj.weight"
    assert drafter.weights[name].shape == (128, HIDDEN // 2)
    assert found[name].shape == made.weights[name].shape
    assert 0.5 < found[name].std() * HIDDEN**0.5 < 1.5
    assert_array_equal(E4M3[[0, 1, 8, 56, 126, 184]], [0, 2**-9, 2**-6, 1, 448, -1])


def test_a_block_goes_on_behind_its_context() -> None:
    """A block of one row, a context of one row: the scores by hand."""
    drafter = tiny_dspark("deepspec", markov=None, confidence=False)
    weights = canonical_weights(drafter.weights, drafter.config)
    body = body_of(weights, drafter.config)
    context, block = np.random.default_rng(0).normal(size=(2, 1, HIDDEN))
    places = np.array([4])
    made = run_block(weights, body, context, block, places, (False,) * LAYERS)
    x = block
    for i in range(LAYERS):
        layer = f"layers.{i}"
        a = norm(weights, f"{layer}.input_layernorm", x, body)
        sides = [context, a]
        both = [
            keys_values(weights, layer, side, np.array([place]), body)
            for side, place in zip(sides, (4, 5), strict=True)
        ]
        keys, values = (np.concatenate(pair) for pair in zip(*both, strict=True))
        asked, _ = queries(weights, layer, a, np.array([5]), body)
        seen = np.ones((1, 2), dtype=bool)
        mixed = attention(asked, keys, values, seen, HEAD_DIM**-0.5).reshape(1, -1)
        x = x + mixed @ weights[f"{layer}.self_attn.o_proj.weight"].T
        x = add_feed_forward(weights, layer, x, body)
    assert_allclose(made, x)
