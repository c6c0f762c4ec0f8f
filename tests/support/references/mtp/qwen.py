"""Heads of Qwen3-Next and Qwen3.5, and of EXAONE MoE, which has their names."""

import dataclasses
from typing import Any

from support.references.mtp.base import Config, Family, Named
from support.references.mtp.blocks import TorchLayer
from support.references.mtp.parts import (
    ORDINARY,
    SIZE,
    expert_tensors,
    grouped_tensors,
    layer_norms,
    mlp_tensors,
    own_number,
    qwen_names,
)
from support.references.tiny_files import Draws

_DELTA: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_hidden_layers": 4,
    "mtp_num_hidden_layers": 1,
}
_QWEN_EXPERTS: Config = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_QWEN_ROPE: Config = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
}


def _make_qwen(draws: Draws, config: Config, layer: int) -> Named:
    prefix = "mtp.layers.0."
    made = layer_norms(draws, prefix)
    made.update(
        grouped_tensors(
            draws,
            f"{prefix}self_attn.",
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            wide_queries=True,
        )
    )
    if "num_experts" not in config:
        return made | mlp_tensors(draws, f"{prefix}mlp.", config["intermediate_size"])
    experts = own_number(config, "num_experts")
    inner = config["moe_intermediate_size"]
    shared = config["shared_expert_intermediate_size"]
    made |= mlp_tensors(draws, f"{prefix}mlp.shared_expert.", shared)
    made[f"{prefix}mlp.shared_expert_gate.weight"] = draws.matrix(1, SIZE)
    if "rope_parameters" not in config:  # Qwen3-Next: each expert by itself
        return made | expert_tensors(draws, f"{prefix}mlp.", experts, inner)
    made[f"{prefix}mlp.gate.weight"] = draws.matrix(experts, SIZE)
    fused = f"{prefix}mlp.experts."
    made[f"{fused}gate_up_proj"] = draws.matrix(experts, 2 * inner, SIZE)
    made[f"{fused}down_proj"] = draws.matrix(experts, SIZE, inner)
    return made


def _qwen(module: str, config: Config, block: TorchLayer) -> Family:
    return Family(module, config, qwen_names, _make_qwen, block, plus_one=True)


_BLOCK = "mtp.layers.0."
_DENSE = TorchLayer(
    "Qwen3_5", _BLOCK, 3, rotary="TextRotaryEmbedding", norms_less_one=True
)


_QWEN35 = {**ORDINARY, **_DELTA, "rope_parameters": _QWEN_ROPE}
QWEN3_NEXT = _qwen(
    "qwen3_next",
    {
        **ORDINARY,
        **_DELTA,
        **_QWEN_EXPERTS,
        "model_type": "qwen3_next",
        "partial_rotary_factor": 0.25,
    },
    TorchLayer("Qwen3Next", _BLOCK, 3, norms_less_one=True),
)
QWEN3_5 = _qwen(
    "qwen3_5",
    {"model_type": "qwen3_5", "text_config": {**_QWEN35, "model_type": "qwen3_5_text"}},
    _DENSE,
)
QWEN3_5_TIED = _qwen(
    "qwen3_5",
    {
        "model_type": "qwen3_5",
        "text_config": {
            **_QWEN35,
            "model_type": "qwen3_5_text",
            "tie_word_embeddings": True,
        },
    },
    _DENSE,
)


def _qwen_moe(changes: Config, **more: Any) -> Family:
    text = {**_QWEN35, **_QWEN_EXPERTS, "model_type": "qwen3_5_moe_text", **more}
    config = {"model_type": "qwen3_5_moe", "text_config": text}
    block = dataclasses.replace(_DENSE, prefix="Qwen3_5Moe", changes=changes)
    return _qwen("qwen3_5_moe", config, block)


QWEN3_5_MOE = _qwen_moe({})
QWEN3_5_MOE_OTHER_EXPERTS = _qwen_moe(
    {"num_experts": 4, "num_experts_per_tok": 3},
    mtp_num_experts=4,
    mtp_num_experts_per_tok=3,
)


def _make_exaone(draws: Draws, config: Config, layer: int) -> Named:
    prefix = "mtp.layers.0."
    return {
        **layer_norms(draws, prefix),
        **grouped_tensors(
            draws,
            f"{prefix}self_attn.",
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
        ),
        **mlp_tensors(draws, f"{prefix}mlp.", config["intermediate_size"]),
    }


def _exaone(layer_types: list[str]) -> Family:
    """Return a family whose head is of the kind of the trunk's first layer.

    The facts do not say of which kind it is.
    """
    config = {
        **ORDINARY,
        "model_type": "exaone_moe",
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "sliding_window": 4,
        "layer_types": layer_types,
        "is_moe_layer": [False, True],
    }
    changes: Config = {"mlp_layer_types": ["dense", "sparse"]}
    if "sliding_attention" not in layer_types:
        # Full layers have positions where none slides; the window is past all slots.
        changes |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 99}
    block = TorchLayer("ExaoneMoe", _BLOCK, 0, changes=changes)
    return Family("exaone_moe", config, qwen_names, _make_exaone, block)


EXAONE_MOE = _exaone(["sliding_attention", "full_attention"])
EXAONE_MOE_FULL = _exaone(["full_attention", "full_attention"])
EXAONE_MOE_FULL_FIRST = _exaone(["full_attention", "sliding_attention"])
