"""Heads of Ernie 4.5."""

from support.references.mtp.base import Config, Family, Named, Names
from support.references.mtp.blocks import TorchLayer
from support.references.mtp.parts import (
    ORDINARY,
    SIZE,
    grouped_tensors,
    layer_norms,
    mlp_tensors,
)
from support.references.tiny_files import Draws


def _ernie_names(config: Config, layer: int) -> Names:
    return Names(
        project="model.mtp_linear_proj.0",
        token_norm="model.mtp_emb_norm.0",
        state_norm="model.mtp_hidden_norm.0",
        last_norm=None,
    )


def _make_ernie(draws: Draws, config: Config, layer: int) -> Named:
    prefix, bias = "model.mtp_block.0.", config["use_bias"]
    made = {
        **layer_norms(draws, prefix),
        **grouped_tensors(
            draws,
            f"{prefix}self_attn.",
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            norms=False,
            bias=bias,
            out_bias=bias,
        ),
        **mlp_tensors(draws, f"{prefix}mlp.", config["intermediate_size"], bias=bias),
    }
    if bias:
        made["model.mtp_linear_proj.0.bias"] = draws.vector(SIZE)
    return made


def _ernie(*, use_bias: bool) -> Family:
    return Family(
        "ernie4_5_moe",
        {
            **ORDINARY,
            "model_type": "ernie4_5_moe",
            "use_bias": use_bias,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
        _ernie_names,
        _make_ernie,
        TorchLayer("Ernie4_5_Moe", "model.mtp_block.0.", 0),
        recycles="before_norm",
    )


ERNIE, ERNIE_BIAS = _ernie(use_bias=False), _ernie(use_bias=True)
