"""Tiny random DFlash drafters, laid out on disk as real ones are."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

DIM, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB, BLOCK = 64, 96, 4, 2, 16, 256, 5
# Further keys of config.json by variant.
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
    },
    "not causal": {
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 12,
        "dflash_config": {"causal": False},
    },
    "swa keys": {"dflash_config": {"use_swa": True, "swa_window_size": 9}},
    "own ends": {},
}


def config_of(variant: str, layers: tuple[int, ...]) -> dict[str, Any]:
    """Return config.json of a drafter that reads these layers of its target."""
    extra = dict(VARIANTS[variant])
    ours = {"mask_token_id": VOCAB - 1, "target_layer_ids": list(layers)}
    ours |= extra.pop("dflash_config", {})
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": DIM,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "block_size": BLOCK,
        "dflash_config": ours,
        **extra,
    }


def tensors_of(variant: str, features: int) -> dict[str, mx.array]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> mx.array:
        values = rng.standard_normal((rows, columns)) * (2.0 / columns**0.5)
        return mx.array(values.astype(np.float32))

    def vector(size: int) -> mx.array:
        return mx.array((1 + 0.3 * rng.standard_normal(size)).astype(np.float32))

    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "fc.weight": matrix(DIM, features * DIM),
        "hidden_norm.weight": vector(DIM),
        "norm.weight": vector(DIM),
    }
    for i in range(2):
        layer = f"layers.{i}."
        tensors |= {
            f"{layer}input_layernorm.weight": vector(DIM),
            f"{layer}post_attention_layernorm.weight": vector(DIM),
            f"{layer}self_attn.q_proj.weight": matrix(wide, DIM),
            f"{layer}self_attn.k_proj.weight": matrix(narrow, DIM),
            f"{layer}self_attn.v_proj.weight": matrix(narrow, DIM),
            f"{layer}self_attn.o_proj.weight": matrix(DIM, wide),
            f"{layer}self_attn.q_norm.weight": vector(HEAD_DIM),
            f"{layer}self_attn.k_norm.weight": vector(HEAD_DIM),
            f"{layer}mlp.gate_proj.weight": matrix(MLP, DIM),
            f"{layer}mlp.up_proj.weight": matrix(MLP, DIM),
            f"{layer}mlp.down_proj.weight": matrix(DIM, MLP),
        }
    if variant == "own ends":
        ids = np.arange(1, VOCAB, 3)
        tensors["embed_tokens.weight"] = matrix(VOCAB, DIM)
        tensors["lm_head.weight"] = matrix(ids.size, DIM)
        tensors["d2t"] = mx.array(ids - np.arange(ids.size))
        tensors["t2d"] = mx.array(np.isin(np.arange(VOCAB), ids))
        tensors = {f"model.{name}": value for name, value in tensors.items()}
    return tensors


def write_dflash(
    folder: Path, variant: str, layers: tuple[int, ...] = (0, 1, 3), **keys: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(config_of(variant, layers) | keys)
    (folder / "config.json").write_text(config, encoding="utf-8")
    tensors = tensors_of(variant, len(layers))
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, metadata={"format": "pt"}
    )
    return folder
