"""Heads of Nemotron-H: attention, then experts, as two layers."""

from typing import Any

from support.references.mtp.base import Config, Family, Named, Names
from support.references.mtp.blocks import NemotronLayer
from support.references.mtp.parts import (
    EXPERTS,
    ORDINARY,
    SIZE,
    grouped_tensors,
    matrices,
    own_number,
    scales,
)
from support.references.tiny_files import Draws


def _nemotron_names(config: Config, layer: int) -> Names:
    return Names(
        project="mtp.layers.0.eh_proj",
        token_norm="mtp.layers.0.enorm",
        state_norm="mtp.layers.0.hnorm",
        last_norm="mtp.layers.1.final_layernorm",
    )


def _make_nemotron(draws: Draws, config: Config, layer: int) -> Named:
    first, second = "mtp.layers.0.", "mtp.layers.1."
    inner, latent = config["moe_intermediate_size"], config.get("moe_latent_size")
    shared = config["moe_shared_expert_intermediate_size"]
    experts = own_number(config, "n_routed_experts")
    width = latent or SIZE
    made = {
        **scales(draws, first, {"norm": SIZE}),
        **scales(draws, second, {"norm": SIZE}),
        **grouped_tensors(
            draws, f"{first}mixer.", heads=4, kv_heads=2, head_dim=16, norms=False
        ),
        f"{second}mixer.gate.weight": draws.matrix(experts, SIZE),
        f"{second}mixer.gate.e_score_correction_bias": abs(draws.vector(experts)),
        **matrices(
            draws,
            f"{second}mixer.shared_experts.",
            {"up_proj": (shared, SIZE), "down_proj": (SIZE, shared)},
        ),
    }
    for expert in range(experts):
        shapes = {"up_proj": (inner, width), "down_proj": (width, inner)}
        made |= matrices(draws, f"{second}mixer.experts.{expert}.", shapes)
    if latent:
        shapes = {"fc1_latent_proj": (latent, SIZE), "fc2_latent_proj": (SIZE, latent)}
        made |= matrices(draws, f"{second}mixer.", shapes)
    return made


def _nemotron(latent: int | None, changes: Config | None = None, **more: Any) -> Family:
    return Family(
        "nemotron_h",
        {
            **{k: v for k, v in ORDINARY.items() if k != "rms_norm_eps"},
            **EXPERTS,
            "model_type": "nemotron_h",
            "layer_norm_epsilon": 1e-5,
            "num_hidden_layers": 3,
            "hybrid_override_pattern": "M*E",
            "mtp_hybrid_override_pattern": "*E",
            "attention_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "mamba_proj_bias": False,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "n_groups": 2,
            "mlp_bias": False,
            "use_bias": False,
            "use_conv_bias": True,
            "moe_shared_expert_intermediate_size": 24,
            "moe_latent_size": latent,
            **more,
        },
        _nemotron_names,
        _make_nemotron,
        NemotronLayer("NemotronH", "mtp.layers.", 0, rotary="", changes=changes or {}),
    )


NEMOTRON_H, NEMOTRON_H_LATENT = _nemotron(None), _nemotron(12)
NEMOTRON_H_FEWER_EXPERTS = _nemotron(
    None, {"n_routed_experts": 4}, mtp_n_routed_experts=4
)
