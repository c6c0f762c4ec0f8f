"""Heads whose block has latent attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from support.references.attention import Indexer, Latent
from support.references.mtp.base import Config, Family, Named, Names, epsilon
from support.references.mtp.parts import (
    EXPERTS,
    LING_EXPERTS,
    ORDINARY,
    SIZE,
    bailing_names,
    deepseek_experts,
    deepseek_mixture,
    dense,
    layer_norms,
    matrices,
    mlp_tensors,
    numbered_names,
    residual,
    scales,
)
from support.references.numerics import Array, Tensors, below, rms_norm, weight
from support.references.rope import (
    inverse_frequencies,
    yarn_frequencies,
    yarn_scale,
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


def _attention(config: Config, **changes: Any) -> Latent:
    rope = config.get("rope_parameters") or config
    dims, base = config["qk_rope_head_dim"], rope["rope_theta"]
    settings: dict[str, Any] = {
        "heads": config["num_attention_heads"],
        "nope": config["qk_nope_head_dim"],
        "rank": config["kv_lora_rank"],
        "angles": inverse_frequencies(dims, base),
    }
    if "rope_scaling" in config:
        scaling = config["rope_scaling"]
        settings["angles"] = yarn_frequencies(dims, base, scaling)
        settings["score_scale"] = yarn_scale(scaling)
    return Latent(**{**settings, **changes})


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


def _run_deepseek(tensors: Tensors, config: Config, layer: int, x: Array) -> Array:
    attention = _attention(config)
    if "index_topk" in config:
        indexer = Indexer(
            heads=config["index_n_heads"],
            angles=attention.angles,
            pairs=config["model_type"] == "glm_moe_dsa",
            top=config["index_topk"],
        )
        attention = _attention(config, indexer=indexer)
    return residual(
        below(tensors, f"model.layers.{config['num_hidden_layers']}."),
        x,
        epsilon(config),
        attention,
        deepseek_mixture(config),
    )


def _deepseek(module: str, **more: Any) -> Family:
    return Family(
        module,
        {**_LATENT, **EXPERTS, "model_type": module, **more},
        numbered_names,
        _make_deepseek,
        _run_deepseek,
        copies=_COPIES,
    )


DEEPSEEK_V3 = _deepseek("deepseek_v3")
DEEPSEEK_V3_YARN = _deepseek(
    "deepseek_v3",
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
DEEPSEEK_V3_WIDE_QUERIES = _deepseek("deepseek_v3", q_lora_rank=None)
DEEPSEEK_V32 = _deepseek("deepseek_v32", **_SPARSE)
GLM_MOE_DSA = _deepseek(
    "glm_moe_dsa",
    **_SPARSE,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
)
GLM4_MOE_LITE = _deepseek("glm4_moe_lite")

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


def _run_longcat(tensors: Tensors, config: Config, layer: int, x: Array) -> Array:
    block, eps = below(tensors, "model.mtp.layers.0."), epsilon(config)
    attention = _attention(
        config,
        eps=1e-5,
        query_scale=(SIZE / config["q_lora_rank"]) ** 0.5,
        state_scale=(SIZE / config["kv_lora_rank"]) ** 0.5,
    )
    first = rms_norm(x, weight(block, "input_layernorm.weight"), eps)
    x = x + attention(below(block, "self_attn."), first)
    second = rms_norm(x, weight(block, "post_attention_layernorm.weight"), eps)
    return x + dense(below(block, "transformer_layer.mlp."), second)


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
    _run_longcat,
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


def _run_bailing(tensors: Tensors, config: Config, layer: int, x: Array) -> Array:
    return residual(
        below(tensors, f"model.layers.{config['num_hidden_layers']}."),
        x,
        epsilon(config),
        _attention(config, out="dense", gated=_is_gated(config)),
        deepseek_mixture(config, bias="gate.expert_bias"),
        attention_name="attention",
    )


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
    _run_bailing,
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
    _run_bailing,
)
# transformers' module for heads expects the last norm under this name.
BAILING_MOE_V3_SHARED_HEAD = dataclasses.replace(
    BAILING_MOE_V3,
    config={**BAILING_MOE_V3.config, "q_lora_rank": None},
    names=numbered_names,
)
