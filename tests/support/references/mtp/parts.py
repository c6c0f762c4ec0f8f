"""Shapes of random tensors that the blocks of several families share.

All families are tiny in the same way: states of 32 numbers, 64 ids, 4 heads.
"""

from support.references.mtp.base import Config, Named, Names
from support.references.tiny_files import Draws

SIZE, VOCAB = 32, 64


def matrices(
    draws: Draws, prefix: str, shapes: dict[str, tuple[int, int]], *, bias: bool = False
) -> Named:
    """Return linear weights, and biases where asked for."""
    made: Named = {}
    for name, shape in shapes.items():
        made[f"{prefix}{name}.weight"] = draws.matrix(*shape)
        if bias:
            made[f"{prefix}{name}.bias"] = draws.vector(shape[0])
    return made


def scales(draws: Draws, prefix: str, sizes: dict[str, int]) -> Named:
    """Return the weights of norms."""
    return {f"{prefix}{name}.weight": draws.scale(n) for name, n in sizes.items()}


def layer_norms(draws: Draws, prefix: str) -> Named:
    """Return the two norms of an ordinary layer."""
    names = ("input_layernorm", "post_attention_layernorm")
    return scales(draws, prefix, dict.fromkeys(names, SIZE))


def mlp_tensors(draws: Draws, prefix: str, inner: int, *, bias: bool = False) -> Named:
    """Return a gated MLP's tensors."""
    shapes = {
        "gate_proj": (inner, SIZE),
        "up_proj": (inner, SIZE),
        "down_proj": (SIZE, inner),
    }
    return matrices(draws, prefix, shapes, bias=bias)


def expert_tensors(draws: Draws, prefix: str, experts: int, inner: int) -> Named:
    """Return a gate and experts, each by itself."""
    made = {f"{prefix}gate.weight": draws.matrix(experts, SIZE)}
    for expert in range(experts):
        made.update(mlp_tensors(draws, f"{prefix}experts.{expert}.", inner))
    return made


def grouped_tensors(
    draws: Draws,
    prefix: str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    wide_queries: bool = False,
    norms: bool = True,
    bias: bool = False,
    out_bias: bool = False,
) -> Named:
    """Return the tensors of grouped attention."""
    value_dim = value_dim or head_dim
    shapes = {
        "q_proj": (heads * head_dim * (2 if wide_queries else 1), SIZE),
        "k_proj": (kv_heads * head_dim, SIZE),
        "v_proj": (kv_heads * value_dim, SIZE),
    }
    made = matrices(draws, prefix, shapes, bias=bias)
    out = {"o_proj": (SIZE, heads * value_dim)}
    made.update(matrices(draws, prefix, out, bias=out_bias))
    if norms:
        made.update(
            scales(draws, prefix, dict.fromkeys(("q_norm", "k_norm"), head_dim))
        )
    return made


ORDINARY: Config = {
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}


# Config keys and tensors of DeepSeek's experts, which GLM and Bailing took over.
EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


# Those of Ling.
LING_EXPERTS: Config = {
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def deepseek_experts(
    draws: Draws, prefix: str, config: Config, *, bias: str = "e_score_correction_bias"
) -> Named:
    """Return a gate with a bias, experts, and a shared one.

    The bias is not negative: what a closed group scores then is never chosen, be it
    0 or minus infinity.
    """
    experts = config.get("n_routed_experts") or config["num_experts"]
    inner = config["moe_intermediate_size"]
    return {
        **expert_tensors(draws, prefix, experts, inner),
        f"{prefix}gate.{bias}": abs(draws.vector(experts)),
        **mlp_tensors(draws, f"{prefix}shared_experts.", inner),
    }


def own_number(config: Config, name: str) -> int:
    """Return a number that a head may have of its own, after "mtp_"."""
    own = f"mtp_{name}"
    return int(config[own if own in config else name])


def numbered_names(config: Config, layer: int) -> Names:
    """Return DeepSeek's names: the head is the layer after the last."""
    prefix = f"model.layers.{config['num_hidden_layers'] + layer}."
    return Names(
        project=f"{prefix}eh_proj",
        token_norm=f"{prefix}enorm",
        state_norm=f"{prefix}hnorm",
        last_norm=f"{prefix}shared_head.norm",
    )


def qwen_names(config: Config, layer: int) -> Names:
    """Return Qwen's names: everything below "mtp."."""
    return Names(
        project="mtp.fc",
        token_norm="mtp.pre_fc_norm_embedding",
        state_norm="mtp.pre_fc_norm_hidden",
        last_norm="mtp.norm",
    )


def bailing_names(config: Config, layer: int) -> Names:
    """Return Bailing's names: DeepSeek's, but for the last norm."""
    prefix = f"model.layers.{config['num_hidden_layers'] + layer}."
    return Names(
        project=f"{prefix}eh_proj",
        token_norm=f"{prefix}enorm",
        state_norm=f"{prefix}hnorm",
        last_norm=f"{prefix}final_layernorm",
    )
