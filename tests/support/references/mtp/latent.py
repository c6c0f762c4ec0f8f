"""Heads whose block has latent attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from support.references.mtp.base import Config, Family, Named, Names
from support.references.mtp.blocks import LongcatLayer, MlxLayer, TorchLayer
from support.references.mtp.parts import (
    EXPERTS,
    LING_EXPERTS,
    ORDINARY,
    SIZE,
    bailing_names,
    deepseek_experts,
    layer_norms,
    matrices,
    mlp_tensors,
    numbered_names,
    scales,
)
from support.references.tiny_files import Draws

_LATENT: Config = {
    **{k: v for k, v in ORDINARY.items() if k != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "attention_bias": False,
}
_COPIES: Mapping[str, Literal["embedding", "head"]] = {
    "model.layers.2.embed_tokens.weight": "embedding",
    "model.layers.2.shared_head.head.weight": "head",
}


def _latent_tensors(
    draws: Draws, prefix: str, config: Config, *, out: str = "o_proj"
) -> Named:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    narrow, values = config["q_lora_rank"], config["v_head_dim"]
    shapes = {
        "kv_a_proj_with_mqa": (rank + turned, SIZE),
        "kv_b_proj": (heads * (nope + values), rank),
        out: (SIZE, heads * values),
    }
    norms = {"kv_a_layernorm": rank}
    if narrow is None:
        shapes["q_proj"] = (heads * (nope + turned), SIZE)
    else:
        shapes["q_a_proj"] = (narrow, SIZE)
        shapes["q_b_proj"] = (heads * (nope + turned), narrow)
        norms["q_a_layernorm"] = narrow
    return {**matrices(draws, prefix, shapes), **scales(draws, prefix, norms)}


# DeepSeek V3, V3.2, GLM-5, GLM-4.7-Flash --------------------------------------

_SPARSE: Config = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 4}


def _make_deepseek(draws: Draws, config: Config, layer: int) -> Named:
    prefix = f"model.layers.{config['num_hidden_layers']}."
    made = {
        **layer_norms(draws, prefix),
        **_latent_tensors(draws, f"{prefix}self_attn.", config),
        **deepseek_experts(draws, f"{prefix}mlp.", config),
    }
    if "index_topk" in config:
        width, heads = config["index_head_dim"], config["index_n_heads"]
        shapes = {
            "wq_b": (heads * width, config["q_lora_rank"]),
            "wk": (width, SIZE),
            "weights_proj": (heads, SIZE),
        }
        index = f"{prefix}self_attn.indexer."
        made |= matrices(draws, index, shapes)
        made[f"{index}k_norm.weight"] = draws.scale(width)
        made[f"{index}k_norm.bias"] = draws.vector(width)
    return made


def _deepseek(module: str, prefix: str, **more: Any) -> Family:
    return Family(
        module,
        {**_LATENT, **EXPERTS, "model_type": module, **more},
        numbered_names,
        _make_deepseek,
        TorchLayer(prefix, "model.layers.2.", 1),
        copies=_COPIES,
    )


DEEPSEEK_V3 = _deepseek("deepseek_v3", "DeepseekV3")
DEEPSEEK_V3_YARN = _deepseek(
    "deepseek_v3",
    "DeepseekV3",
    rope_scaling={
        "type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 16,
        "beta_fast": 2,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
)
DEEPSEEK_V3_WIDE_QUERIES = _deepseek("deepseek_v3", "DeepseekV3", q_lora_rank=None)
DEEPSEEK_V32 = _deepseek("deepseek_v32", "DeepseekV32", **_SPARSE)
GLM_MOE_DSA = _deepseek(
    "glm_moe_dsa",
    "GlmMoeDsa",
    **_SPARSE,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
)
GLM4_MOE_LITE = _deepseek("glm4_moe_lite", "Glm4MoeLite")

# LongCat-Flash ----------------------------------------------------------------


def _longcat_names(config: Config, layer: int) -> Names:
    return Names(
        project="model.mtp.layers.0.eh_proj",
        token_norm="model.mtp.layers.0.enorm.m",
        state_norm="model.mtp.layers.0.hnorm.m",
        last_norm="model.mtp.norm",
    )


def _make_longcat(draws: Draws, config: Config, layer: int) -> Named:
    prefix = "model.mtp.layers.0."
    inner = config["ffn_hidden_size"]
    return {
        **layer_norms(draws, prefix),
        **_latent_tensors(draws, f"{prefix}self_attn.", config),
        **mlp_tensors(draws, f"{prefix}transformer_layer.mlp.", inner),
    }


LONGCAT_FLASH = Family(
    "longcat_flash",
    {
        **{k: v for k, v in _LATENT.items() if k != "num_hidden_layers"},
        "model_type": "longcat_flash",
        "num_layers": 2,
        "attention_method": "MLA",
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
        "moe_topk": 2,
        "routed_scaling_factor": 1.5,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    _longcat_names,
    _make_longcat,
    LongcatLayer("LongcatFlash", "model.mtp.layers.0.", 0, changes={"head_dim": 8}),
    copies={"model.mtp.embed_tokens.weight": "embedding"},
)

# Ling 2.5 and 3 ---------------------------------------------------------------


def _make_bailing(draws: Draws, config: Config, layer: int) -> Named:
    prefix = f"model.layers.{config['num_hidden_layers']}."
    made = {
        **layer_norms(draws, prefix),
        **_latent_tensors(draws, f"{prefix}attention.", config, out="dense"),
        **deepseek_experts(draws, f"{prefix}mlp.", config, bias="expert_bias"),
    }
    if _is_gated(config):
        gate = draws.matrix(config["num_attention_heads"], SIZE)
        made[f"{prefix}attention.g_proj.weight"] = gate
    return made


def _is_gated(config: Config) -> bool:
    return bool(config["model_type"] == "bailing_moe_v3")


_LING: Config = {
    **_LATENT,
    **LING_EXPERTS,
    "head_dim": 8,
    "layer_group_size": 2,
}
BAILING_HYBRID = Family(
    "bailing_hybrid",
    {
        **_LING,
        "model_type": "bailing_hybrid",
        "group_norm_size": 1,
        "partial_rotary_factor": 0.5,
    },
    bailing_names,
    _make_bailing,
    MlxLayer("DecoderLayer"),
)
BAILING_MOE_V3 = Family(
    "bailing_moe_v3",
    {
        **_LING,
        "model_type": "bailing_moe_v3",
        "moe_shared_expert_intermediate_size": 16,
        "short_conv_kernel_size": 4,
    },
    bailing_names,
    _make_bailing,
    MlxLayer("BailingDecoderLayer"),
)
# transformers' module for heads expects the last norm under this name.
BAILING_MOE_V3_SHARED_HEAD = dataclasses.replace(
    BAILING_MOE_V3,
    config={**BAILING_MOE_V3.config, "q_lora_rank": None},
    names=numbered_names,
)
