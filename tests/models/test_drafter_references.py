"""The numpy references of drafters against transformers' own models, on torch.

transformers has Gemma 4 assistants, and a DFlash drafter of another family with the
same layers under other names. It has no EAGLE-3: of that, its one layer is compared
with a Llama layer where the two are the same.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    LlamaConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from transformers.cache_utils import DFlashCache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from support.references import dflash, eagle3, gemma4_assistant
from support.references.numerics import Array, below
from support.references.torch_heads import fill, to_torch

TOLERANCE = 1e-5


def assert_close(reference: Array, theirs: Any) -> None:
    values = theirs.detach().numpy().astype(np.float64)
    assert np.abs(reference - values).max() <= TOLERANCE * np.abs(values).max()


@pytest.mark.parametrize("centroids", [None, 16])
@pytest.mark.parametrize(("kv_heads", "global_kv_heads"), [(1, None), (2, 1)])
@pytest.mark.parametrize(("full", "sliding"), [(20, 16), (5, 5)])
def test_a_gemma4_assistant_equals_that_of_transformers(
    tmp_path: Path,
    centroids: int | None,
    kv_heads: int,
    global_kv_heads: int | None,
    full: int,
    sliding: int,
) -> None:
    tensors, config = gemma4_assistant.write_tiny(
        tmp_path,
        3,
        centroids=centroids,
        kv_heads=kv_heads,
        global_kv_heads=global_kv_heads,
    )
    theirs = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**config)).eval()
    fill(theirs, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    generator = np.random.default_rng(7)
    embedding, hidden = generator.standard_normal((2, 64))
    shared = {
        kind: (
            generator.standard_normal((heads, entries, size)),
            generator.standard_normal((heads, entries, size)),
        )
        for kind, heads, entries, size in (
            ("full_attention", global_kv_heads or kv_heads, full, 32),
            ("sliding_attention", kv_heads, sliding, 16),
        )
    }
    for position in (full - 1, full):
        step = gemma4_assistant.forward(
            tensors, config, embedding, hidden, shared, position=position
        )
        joined = np.concatenate([embedding * np.sqrt(64), hidden])
        with torch.no_grad():
            out = theirs(
                inputs_embeds=to_torch(joined)[None, None],
                position_ids=torch.tensor([[position]]),
                shared_kv_states={
                    kind: (to_torch(keys)[None], to_torch(values)[None])
                    for kind, (keys, values) in shared.items()
                },
            )
        assert_close(step.logits, out.logits[0, 0])
        assert_close(step.hidden, out.last_hidden_state[0, 0])
        hidden = step.hidden


@pytest.mark.parametrize("window", [None, 3, 5, 30])
@pytest.mark.parametrize("start", [0, 40])
def test_a_dflash_block_equals_that_of_transformers(
    tmp_path: Path, window: int | None, start: int
) -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    if window is None:
        kinds[2] = "full_attention"
    tensors, config = dflash.write_tiny(
        tmp_path,
        3,
        layers=3,
        layer_types=kinds,
        # transformers sees `window` tokens to either side of a block row.
        sliding_window=None if window is None else window + 1,
        causal=False,
    )
    theirs = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{
                name: config[name]
                for name in (
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "head_dim",
                    "rms_norm_eps",
                    "layer_types",
                    "block_size",
                )
            },
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            sliding_window=window or 99,
            target_layer_ids=config["dflash_config"]["target_layer_ids"],
            mask_token_id=255,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    ).eval()
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    fill(
        theirs,
        {
            next(
                (
                    new + k[len(old) :]
                    for old, new in names.items()
                    if k[: len(old)] == old
                ),
                k,
            ): v
            for k, v in tensors.items()
        },
    )
    generator = np.random.default_rng(7)
    features = generator.standard_normal((12, 3 * 64))
    cache = DFlashCache(config=theirs.config)
    cache.activate_past_recording()
    for old, new in ((0, 9), (9, 12)):  # nine tokens of context, then three more
        block = generator.standard_normal((4, 64))
        ours = dflash.forward(
            tensors, config, features[:new], block, head=np.eye(64), start=start
        )
        if old:
            cache.crop(-4)  # the last block
        cache.set_previous_accepted_tokens(new - old)
        with torch.no_grad():
            out = theirs(
                noise_embeds=to_torch(block)[None],
                context_hidden_states=to_torch(features[old:new])[None],
                position_ids=start + torch.arange(old, new + 4)[None],
                cache=cache,
            )
        assert_close(ours, out.last_hidden_state[0])


ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("scaling", [None, ROPE])
def test_an_eagle3_layer_equals_parts_of_transformers_llama(
    tmp_path: Path, scaling: dict[str, Any] | None
) -> None:
    tensors, config = eagle3.write_tiny(tmp_path, 3, rope_scaling=scaling)
    generator = np.random.default_rng(7)
    embedding, head = generator.standard_normal((2, 256, 64))
    features = generator.standard_normal((9, 3 * 64))
    tokens = generator.integers(0, 256, 9)
    rows = eagle3.forward(
        tensors, config, features, tokens, embedding=embedding, head=head
    )
    llama = LlamaConfig(**config, pad_token_id=None, bos_token_id=None)
    llama.eos_token_id = None
    llama._attn_implementation = "eager"
    block = below(tensors, "midlayer.")

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = LlamaRMSNorm(64, eps=config["rms_norm_eps"])
        source = tensors if name == "norm" else block
        fill(module, {"weight": source[f"{name}.weight"]})
        return module(x)

    attention = LlamaAttention(llama, 0)
    for name in ("q_proj", "k_proj", "v_proj"):  # they read token and state
        width = getattr(attention, name).out_features
        setattr(attention, name, torch.nn.Linear(128, width, bias=False))
    fill(attention, below(block, "self_attn."))
    mlp = LlamaMLP(llama)
    fill(mlp, below(block, "mlp."))
    with torch.no_grad():
        state = to_torch(features)[None] @ to_torch(tensors["fc.weight"]).T
        token = to_torch(embedding[tokens])[None]
        both = [norm("input_layernorm", token), norm("hidden_norm", state)]
        mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)
        angles = LlamaRotaryEmbedding(llama)(state, torch.arange(9)[None])
        mixed, _ = attention(torch.cat(both, dim=-1), angles, mask[None, None])
        x = state + mixed
        x = x + mlp(norm("post_attention_layernorm", x))
        logits = norm("norm", x) @ to_torch(tensors["lm_head.weight"]).T
    assert_close(rows.recycled, x[0])
    assert_close(rows.logits, logits[0])
