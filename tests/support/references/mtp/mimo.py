"""Heads of MiMo-7B and MiMo-V2-Flash."""

import dataclasses

import numpy as np

from support.references.mtp.base import Config, Family, Named, Names
from support.references.mtp.blocks import TorchLayer
from support.references.mtp.parts import (
    EXPERTS,
    ORDINARY,
    SIZE,
    grouped_tensors,
    layer_norms,
    mlp_tensors,
    scales,
)
from support.references.numerics import Array, Tensors
from support.references.tiny_files import Draws


def _mimo_names(config: Config, layer: int) -> Names:
    prefix = f"model.mtp_layers.{layer}."
    return Names(
        project=f"{prefix}input_proj",
        token_norm=f"{prefix}token_layernorm",
        state_norm=f"{prefix}hidden_layernorm",
        last_norm=f"{prefix}final_layernorm",
    )


def _make_mimo(draws: Draws, config: Config, layer: int) -> Named:
    prefix = f"model.mtp_layers.{layer}."
    return {
        **layer_norms(draws, prefix),
        **grouped_tensors(
            draws,
            f"{prefix}self_attn.",
            heads=4,
            kv_heads=2,
            head_dim=8,
            norms=False,
            bias=True,
        ),
        **mlp_tensors(draws, f"{prefix}mlp.", config["intermediate_size"]),
    }


MIMO = Family(
    "mimo",
    {k: v for k, v in ORDINARY.items() if k != "head_dim"} | {"model_type": "mimo"},
    _mimo_names,
    _make_mimo,
    # MiMo's block is Qwen2's.
    TorchLayer(
        "Qwen2",
        "model.mtp_layers.0.",
        0,
        module="qwen2",
        changes={"model_type": "qwen2"},
        skipped=("token_layern", "hidden_layern", "final_layern", "input_proj"),
    ),
    hidden_first=True,
    state="before_norm",
    recycles="before_norm",
)


def _mimo_v2_names(config: Config, layer: int) -> Names:
    prefix = f"model.mtp.layers.{layer}."
    return Names(
        project=f"{prefix}eh_proj",
        token_norm=f"{prefix}enorm",
        state_norm=f"{prefix}hnorm",
        last_norm=f"{prefix}final_layernorm",
    )


def _make_mimo_v2(draws: Draws, config: Config, layer: int) -> Named:
    prefix = f"model.mtp.layers.{layer}."
    norms = ("input_layernorm", "pre_mlp_layernorm")
    heads = config["swa_num_attention_heads"]
    return {
        **scales(draws, prefix, dict.fromkeys(norms, SIZE)),
        **grouped_tensors(
            draws,
            f"{prefix}self_attn.",
            heads=heads,
            kv_heads=config["swa_num_key_value_heads"],
            head_dim=config["swa_head_dim"],
            value_dim=config["swa_v_head_dim"],
            norms=False,
        ),
        f"{prefix}self_attn.attention_sink_bias": draws.vector(heads, size=1.0),
        **mlp_tensors(draws, f"{prefix}mlp.", config["intermediate_size"]),
    }


def _make_mimo_v2_pro(draws: Draws, config: Config, layer: int) -> Named:
    """Return the same with one projection for queries, keys and values."""
    made = _make_mimo_v2(draws, config, layer)
    prefix = f"model.mtp.layers.{layer}.self_attn."
    parts = [made.pop(f"{prefix}{which}_proj.weight") for which in "qkv"]
    return {**made, f"{prefix}qkv_proj.weight": np.concatenate(parts)}


def _run_mimo_v2_pro(family: Family, tensors: Tensors, layer: int, x: Array) -> Array:
    name = f"model.mtp.layers.{layer}.self_attn.qkv_proj.weight"
    sizes = [heads * family.config["swa_head_dim"] for heads in (4, 4 + 2)]
    split = {key: value for key, value in tensors.items() if key != name}
    for which, part in zip("qkv", np.split(tensors[name], sizes), strict=True):
        split[name.replace("qkv", which)] = part
    return _MIMO_V2(family, split, layer, x)


_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
_MIMO_V2 = TorchLayer(
    "MiMoV2Flash",
    "model.mtp.layers.0.",
    1,
    changes={
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "dense"],
        "rms_norm_eps": 1e-5,
        "head_dim": 16,
        "v_head_dim": 8,
        "num_key_value_heads": 1,  # and twice as many in sliding layers
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    renames={
        "attention_sink_bias": "sinks",
        "pre_mlp_layernorm": "post_attention_layernorm",
    },
)
MIMO_V2_FLASH = Family(
    "mimo_v2_flash",
    {
        **{k: v for k, v in ORDINARY.items() if k != "rms_norm_eps"},
        **EXPERTS,
        "model_type": "mimo_v2_flash",
        "layernorm_epsilon": 1e-5,
        "n_shared_experts": None,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 4,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 8,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.707,
    },
    _mimo_v2_names,
    _make_mimo_v2,
    _MIMO_V2,
    layers=3,
    used=1,
    state="before_norm",
)
MIMO_V2_PRO = dataclasses.replace(
    MIMO_V2_FLASH, make=_make_mimo_v2_pro, block=_run_mimo_v2_pro
)
