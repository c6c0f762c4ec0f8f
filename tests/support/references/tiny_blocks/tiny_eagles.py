"""Tiny random P-EAGLE heads and EAGLE-3 heads of every dialect that is described."""

from typing import Any

from support.references.tiny_blocks.tiny_tensors import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MASK,
    SIZES,
    VOCABULARY,
    Tensors,
    TinyDrafter,
)

DRAFT_VOCABULARY = 96
Config = dict[str, Any]
EAGLE3 = (
    "authors",
    "eagle3.1",
    "deepspec",
    "deepspec-gemma4",
    "speculators-qwen3",
    "speculators-plain-residual",
    "specforge",
    "vllm",
    "normed-residual",
    "joined-norm",
    "llama3",
    "several-layers",
    "last-hidden",
    "last-hidden-without-fc",
    "sliding",
    "biased",
    "full-vocabulary",
    "tied",
    "logit-scale",
    "four-taps",
    "mla",
    "vision",
    "minimax",
)
P_EAGLE = ("speculators", "aws", "qwen3")


def head_tensors(
    tensors: Tensors,
    *,
    taps: int = 3,
    layers: int = 1,
    fc: bool = True,
    fc_bias: bool = False,
    vocabulary: int | None = DRAFT_VOCABULARY,
    own_head: bool = True,
    own_embedding: bool = False,
    midlayer: bool = False,
    **layer: Any,
) -> None:
    """The tensors of an EAGLE-3 head; further keys are those of `Tensors.layer`.

    Args:
        tensors: Where they go.
        taps: Tapped layers (m).
        layers: Layer 0 is fused, the others are plain.
        fc: With fc [H, m H].
        fc_bias: With its bias.
        vocabulary: Vd with d2t and t2d, None for the full one.
        own_head: With `lm_head`.
        own_embedding: With `embed_tokens`.
        midlayer: Layer 0 is called `midlayer`.
        **layer: See `Tensors.layer`.
    """
    if fc:
        tensors.linear("fc", HIDDEN, taps * HIDDEN, bias=fc_bias)
    for i in range(layers):
        name = "midlayer" if midlayer and not i else f"layers.{i}"
        tensors.layer(name, reads=HIDDEN if i else 2 * HIDDEN, **layer)
        if not i:
            tensors.norm(f"{name}.hidden_norm", HIDDEN)
    tensors.norm("norm", HIDDEN)
    if own_head:
        tensors.linear("lm_head", vocabulary or VOCABULARY, HIDDEN)
    if vocabulary is not None:
        tensors.reduced(vocabulary)
    if own_embedding:
        tensors.normal("embed_tokens.weight", VOCABULARY, HIDDEN)


def tiny_eagle3(dialect: str, *, seed: int = 0) -> TinyDrafter:
    """A head of one of `EAGLE3`; 3 taps unless the dialect says otherwise."""
    tensors = Tensors(seed)
    config: Config = {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "tie_word_embeddings": False,
    }
    named = _NAMED.get(dialect)
    if named is not None:
        return named(tensors, config)
    keys, arguments = _SIMPLE[dialect]
    head_tensors(tensors, **{"head_norms": False, **arguments})
    return TinyDrafter({**config, **keys}, tensors.found)


# What differs from an ordinary head: keys of the config, arguments of `head_tensors`.
_SIMPLE: dict[str, tuple[Config, dict[str, Any]]] = {
    "authors": (
        {"architectures": ["LlamaForCausalLM"]},
        {"midlayer": True},
    ),
    "specforge": (
        {
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
            }
        },
        {"midlayer": True},
    ),
    "vllm": (
        {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "eagle_aux_hidden_state_layer_ids": [2, 3, 7],
        },
        {"own_embedding": True},
    ),
    "normed-residual": ({"norm_before_residual": True}, {}),
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {},
    ),
    "several-layers": ({"num_hidden_layers": 3}, {"layers": 3}),
    "last-hidden": ({"eagle_config": {"use_aux_hidden_state": False}}, {"taps": 1}),
    "last-hidden-without-fc": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"fc": False},
    ),
    "sliding": (
        {"layer_types": ["sliding_attention"], "sliding_window": 4},
        {},
    ),
    "biased": ({"attention_bias": True, "bias": True}, {"bias": True, "fc_bias": True}),
    "full-vocabulary": (
        {"draft_vocab_size": None},
        {"vocabulary": None, "own_head": False},
    ),
    "tied": (
        {"draft_vocab_size": VOCABULARY, "tie_word_embeddings": True},
        {"vocabulary": None, "own_head": False, "own_embedding": True},
    ),
    "logit-scale": ({"logit_scale": 0.25}, {}),
    "four-taps": ({"num_aux_hidden_states": 4}, {"taps": 4}),
    "vision": (
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        {},
    ),
}


def _eagle31(tensors: Tensors, config: Config) -> TinyDrafter:
    """A norm per tap, and the normed state is recycled."""
    head_tensors(tensors, head_norms=False)
    for j in range(3):
        tensors.norm(f"fc_norm.{j}", HIDDEN)
    keys = {"fc_norm": True, "norm_output": True}
    return TinyDrafter({**config, **keys}, tensors.found)


def _deepspec(tensors: Tensors, config: Config) -> TinyDrafter:
    """Five layer ids, q_norm and k_norm, all ids, tables of its own."""
    head_tensors(tensors, taps=5, vocabulary=None, own_embedding=True)
    keys = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_target_layers": 12,
        "target_layer_ids": [1, 3, 5, 7, 9],
        "ttt_length": 7,
        "step_loss_decay": 0.8,
    }
    del config["draft_vocab_size"]
    return TinyDrafter({**config, **keys}, tensors.found)


def _deepspec_gemma4(tensors: Tensors, config: Config) -> TinyDrafter:
    """The same with Gemma 4's layer."""
    gemma: Config = {"head_dim": 32, "kv_heads": 1, "values": False}
    head_tensors(tensors, taps=5, vocabulary=None, own_embedding=True, **gemma)
    tensors.sandwich("layers.0")
    full = {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }
    keys = {
        "architectures": ["Gemma4Eagle3Model"],
        "model_type": "gemma4_text",
        "num_target_layers": 12,
        "target_layer_ids": [1, 3, 5, 7, 9],
        "ttt_length": 7,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "rope_theta": None,
        "rope_parameters": {"full_attention": full},
    }
    del config["draft_vocab_size"]
    return TinyDrafter({**config, **keys}, tensors.found)


def _joined_norm(tensors: Tensors, config: Config) -> TinyDrafter:
    """A norm over the joined taps."""
    head_tensors(tensors, head_norms=False)
    tensors.norm("input_norm", 3 * HIDDEN)
    return TinyDrafter(config, tensors.found)


def _speculators_plain_residual(tensors: Tensors, config: Config) -> TinyDrafter:
    tiny = _speculators_qwen3(tensors, config)
    return TinyDrafter({**tiny.config, "norm_before_residual": False}, tiny.weights)


def _speculators_qwen3(tensors: Tensors, config: Config) -> TinyDrafter:
    """Sizes nested, q_norm and k_norm, residual from the normed state."""
    head_tensors(tensors, own_embedding=True)
    keys: Config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
        "transformer_layer_config": {
            **SIZES,
            "model_type": "qwen3",
            "num_hidden_layers": 1,
        },
    }
    return TinyDrafter(keys, tensors.found)


def _mla(tensors: Tensors, config: Config) -> TinyDrafter:
    """DeepSeek's latent attention over [embedding | state]."""
    head_tensors(tensors, head_norms=False)
    attention = "layers.0.self_attn"
    for side in "qkvo":
        del tensors.found[f"{attention}.{side}_proj.weight"]
    rank, q_rank, nope, rotated, values = 24, 32, 16, 8, 12
    tensors.linear(f"{attention}.q_a_proj", q_rank, 2 * HIDDEN)
    tensors.norm(f"{attention}.q_a_layernorm", q_rank)
    tensors.linear(f"{attention}.q_b_proj", HEADS * (nope + rotated), q_rank)
    tensors.linear(f"{attention}.kv_a_proj_with_mqa", rank + rotated, 2 * HIDDEN)
    tensors.norm(f"{attention}.kv_a_layernorm", rank)
    tensors.linear(f"{attention}.kv_b_proj", HEADS * (nope + values), rank)
    tensors.linear(f"{attention}.o_proj", HIDDEN, HEADS * values)
    keys = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": rank,
        "q_lora_rank": q_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rotated,
        "v_head_dim": values,
    }
    return TinyDrafter({**config, **keys}, tensors.found)


def _minimax(tensors: Tensors, config: Config) -> TinyDrafter:
    """q_norm and k_norm over the whole width."""
    head_tensors(tensors, head_norms=False)
    tensors.norm("layers.0.self_attn.q_norm", HEADS * HEAD_DIM)
    tensors.norm("layers.0.self_attn.k_norm", KV_HEADS * HEAD_DIM)
    keys = {
        "architectures": ["Eagle3MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
    }
    return TinyDrafter({**config, **keys}, tensors.found)


_NAMED = {
    "eagle3.1": _eagle31,
    "deepspec": _deepspec,
    "deepspec-gemma4": _deepspec_gemma4,
    "speculators-qwen3": _speculators_qwen3,
    "speculators-plain-residual": _speculators_plain_residual,
    "joined-norm": _joined_norm,
    "mla": _mla,
    "minimax": _minimax,
}


def tiny_p_eagle(packaging: str, *, seed: int = 0, layers: int = 2) -> TinyDrafter:
    """A P-EAGLE head of `layers` layers, 3 taps, Vd 96.

    Args:
        packaging: One of `P_EAGLE`: speculators' ("speculators"), an ordinary EAGLE-3
            config ("aws"), the same with q_norm and k_norm and without d2t ("qwen3").
        seed: Of all tensors.
        layers: At least 1.
    """
    tensors = Tensors(seed)
    qwen3 = packaging == "qwen3"
    head_tensors(
        tensors,
        layers=layers,
        own_embedding=True,
        head_norms=qwen3,
        vocabulary=None if qwen3 else DRAFT_VOCABULARY,
    )
    width = 3 * HIDDEN
    shape = (1, 1, width) if packaging == "speculators" else (1, width)
    tensors.normal("mask_hidden", *shape)
    sizes = {**SIZES, "num_hidden_layers": layers}
    sizes["model_type"] = "qwen3" if qwen3 else "llama"
    config: Config
    if packaging == "speculators":
        config = {
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "transformer_layer_config": sizes,
            "draft_vocab_size": DRAFT_VOCABULARY,
            "mask_token_id": MASK,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "speculators_config": {
                "algorithm": "peagle",
                "proposal_methods": [{"speculative_tokens": 8}],
            },
        }
    elif packaging in ("aws", "qwen3"):
        name = "PeagleQwen3ForCausalLM" if qwen3 else "LlamaForCausalLMEagle3"
        config = {
            **sizes,
            "architectures": [name],
            "ptd_token_id": MASK,
            "parallel_drafting": True,
            "draft_vocab_size": None if qwen3 else DRAFT_VOCABULARY,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        }
    else:
        raise ValueError(f"unknown packaging {packaging!r}")
    return TinyDrafter(config, tensors.found)
