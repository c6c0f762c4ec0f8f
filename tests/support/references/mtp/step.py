"""Heads of Step-3.5: three layers in a chain, each with its own head."""

import dataclasses

from support.references.mtp.base import Config, Family, Named, Names
from support.references.mtp.blocks import MlxLayer
from support.references.mtp.parts import (
    ORDINARY,
    SIZE,
    grouped_tensors,
    layer_norms,
    mlp_tensors,
)
from support.references.tiny_files import Draws


def _step_names(config: Config, layer: int) -> Names:
    prefix = f"model.layers.{config['num_hidden_layers'] + layer}."
    return Names(
        project=f"{prefix}eh_proj",
        token_norm=f"{prefix}enorm",
        state_norm=f"{prefix}hnorm",
        last_norm=f"{prefix}shared_head.norm",
        head=f"{prefix}shared_head.output",
    )


def _infix_names(config: Config, layer: int) -> Names:
    plain = _step_names(config, layer)
    infix = {
        name: getattr(plain, name).replace("shared_head", "transformer.shared_head")
        for name in ("last_norm", "head")
    }
    return dataclasses.replace(plain, **infix)


def _step_heads(config: Config, index: int) -> tuple[int, int]:
    """Return the numbers of heads of queries and of keys in a layer."""
    if config["layer_types"][index] == "sliding_attention":
        other = config["attention_other_setting"]
        return other["num_attention_heads"], other["num_attention_groups"]
    return config["num_attention_heads"], config["num_attention_groups"]


def _make_step(draws: Draws, config: Config, layer: int) -> Named:
    index = config["num_hidden_layers"] + layer
    prefix, (heads, kv_heads) = f"model.layers.{index}.", _step_heads(config, index)
    return {
        **layer_norms(draws, prefix),
        **grouped_tensors(
            draws, f"{prefix}self_attn.", heads=heads, kv_heads=kv_heads, head_dim=16
        ),
        f"{prefix}self_attn.g_proj.weight": draws.matrix(heads, SIZE),
        **mlp_tensors(draws, f"{prefix}mlp.", config["intermediate_size"]),
    }


STEP3P5 = Family(
    "step3p5",
    {
        **ORDINARY,
        "model_type": "step3p5",
        "num_attention_groups": 2,
        "num_nextn_predict_layers": 3,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4,
        "layer_types": [
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
        "rope_theta": [5000.0, 10000.0, 10000.0, 5000.0, 10000.0],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 256,
        },
        "yarn_only_types": ["full_attention"],
        "swiglu_limits_shared": None,
        "attention_other_setting": {
            "num_attention_heads": 6,
            "num_attention_groups": 3,
        },
        "use_head_wise_attn_gate": True,
        "moe_layers_enum": "1",
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 16,
        "share_expert_dim": 16,
    },
    _step_names,
    _make_step,
    MlxLayer("Step3p5DecoderLayer"),
    layers=3,
    plus_one=True,
    state="before_norm",
    recycles="before_norm",
)
STEP3P5_INFIX = dataclasses.replace(STEP3P5, names=_infix_names)
STEP3P5_CLAMPED = dataclasses.replace(
    STEP3P5,
    config={**STEP3P5.config, "swiglu_limits_shared": [0.0, 0.2, 0.3, 0.0, 0.6]},
)
