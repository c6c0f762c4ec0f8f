"""Heads of GLM-4.5 and of Ling 2, which have grouped attention and experts."""

from support.references.mtp.base import Config, Family, Named
from support.references.mtp.blocks import MlxLayer, TorchLayer
from support.references.mtp.parts import (
    EXPERTS,
    LING_EXPERTS,
    ORDINARY,
    SIZE,
    bailing_names,
    deepseek_experts,
    grouped_tensors,
    layer_norms,
    matrices,
    numbered_names,
    scales,
)
from support.references.tiny_files import Draws


def _make_glm(draws: Draws, config: Config, layer: int) -> Named:
    prefix = f"model.layers.{config['num_hidden_layers']}."
    return {
        **layer_norms(draws, prefix),
        **grouped_tensors(
            draws,
            f"{prefix}self_attn.",
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            norms=config["use_qk_norm"],
            bias=config["attention_bias"],
        ),
        **deepseek_experts(draws, f"{prefix}mlp.", config),
    }


def _glm(*, use_qk_norm: bool) -> Family:
    return Family(
        "glm4_moe",
        {
            **ORDINARY,
            **EXPERTS,
            "model_type": "glm4_moe",
            "partial_rotary_factor": 0.5,
            "rope_scaling": None,
            "use_qk_norm": use_qk_norm,
            "attention_bias": True,
        },
        numbered_names,
        _make_glm,
        TorchLayer("Glm4Moe", "model.layers.2.", 1),
        copies={
            "model.layers.2.embed_tokens.weight": "embedding",
            "model.layers.2.shared_head.head.weight": "head",
        },
    )


GLM4_MOE, GLM4_MOE_AIR = _glm(use_qk_norm=True), _glm(use_qk_norm=False)


def _make_ling(draws: Draws, config: Config, layer: int) -> Named:
    prefix = f"model.layers.{config['num_hidden_layers']}."
    attention, norms = f"{prefix}attention.", ("query_layernorm", "key_layernorm")
    return {
        **layer_norms(draws, prefix),
        **matrices(
            draws, attention, {"query_key_value": (64, SIZE), "dense": (SIZE, SIZE)}
        ),
        **scales(draws, attention, dict.fromkeys(norms, 8)),
        **deepseek_experts(draws, f"{prefix}mlp.", config, bias="expert_bias"),
    }


BAILING_MOE = Family(
    "bailing_moe",
    {
        **{k: v for k, v in ORDINARY.items() if k != "head_dim"},
        **LING_EXPERTS,
        "model_type": "bailing_moe",
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    bailing_names,
    _make_ling,
    MlxLayer("BailingMoeDecoderLayer"),
)
