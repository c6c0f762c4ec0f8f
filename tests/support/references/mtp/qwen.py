"""Heads of Qwen3-Next and Qwen3.5, and of EXAONE MoE, which has their names."""

from typing import Any

import numpy as np

from support.references.moe import Router, with_gated_shared
from support.references.mtp.base import Config, Family, Named, epsilon
from support.references.mtp.parts import (
    ORDINARY,
    SIZE,
    dense,
    expert_tensors,
    grouped,
    grouped_tensors,
    layer_norms,
    mlp_tensors,
    own_number,
    qwen_names,
    residual,
)
from support.references.numerics import Array, Tensors, below
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


def _run_qwen(tensors: Tensors, config: Config, layer: int, x: Array) -> Array:
    attention = grouped(config, gate="queries")
    mlp = dense
    if "num_experts" in config:
        router = Router(
            top=own_number(config, "num_experts_per_tok"),
            score="softmax",
        )

        def mlp(tensors: Tensors, x: Array) -> Array:
            return with_gated_shared(tensors, router, x)

    return residual(below(tensors, "mtp.layers.0."), x, epsilon(config), attention, mlp)


def _qwen(module: str, config: Config) -> Family:
    return Family(module, config, qwen_names, _make_qwen, _run_qwen, plus_one=True)


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
)
QWEN3_5 = _qwen(
    "qwen3_5",
    {"model_type": "qwen3_5", "text_config": {**_QWEN35, "model_type": "qwen3_5_text"}},
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
)


def _qwen_moe(**more: Any) -> Family:
    text = {**_QWEN35, **_QWEN_EXPERTS, "model_type": "qwen3_5_moe_text", **more}
    return _qwen("qwen3_5_moe", {"model_type": "qwen3_5_moe", "text_config": text})


QWEN3_5_MOE = _qwen_moe()
QWEN3_5_MOE_OTHER_EXPERTS = _qwen_moe(mtp_num_experts=4, mtp_num_experts_per_tok=3)


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


def _run_exaone(tensors: Tensors, config: Config, layer: int, x: Array) -> Array:
    attention = grouped(config)
    if config["layer_types"][0] == "sliding_attention":
        attention = grouped(config, window=config["sliding_window"])
    elif "sliding_attention" in config["layer_types"]:
        # Full layers between sliding ones have no positions.
        attention = grouped(config, angles=np.zeros(0))
    block = below(tensors, "mtp.layers.0.")
    return residual(block, x, epsilon(config), attention, dense)


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
    return Family("exaone_moe", config, qwen_names, _make_exaone, _run_exaone)


EXAONE_MOE = _exaone(["sliding_attention", "full_attention"])
EXAONE_MOE_FULL = _exaone(["full_attention", "full_attention"])
EXAONE_MOE_FULL_FIRST = _exaone(["full_attention", "sliding_attention"])
