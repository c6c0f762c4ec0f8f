"""A Gemma 4 assistant: four small layers that read the target's own keys and values.

It has no cache: every step of a draft stands at the same position and differs in the
token and in the state of the step before.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.references.numerics import (
    Array,
    Ids,
    Tensors,
    weight,
)
from support.references.tiny_files import Draws, write_folder


def write_tiny(
    folder: Path,
    seed: int,
    *,
    backbone: int = 64,
    hidden: int = 32,
    vocab: int = 256,
    layers: int = 4,
    head_dim: int = 16,
    global_head_dim: int = 32,
    heads: int = 4,
    kv_heads: int = 1,
    global_kv_heads: int | None = None,
    sliding_window: int = 16,
    centroids: int | None = None,
    top_centroids: int = 2,
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Write a random assistant in the layout of a real one.

    Args:
        folder: where config.json and model.safetensors go.
        seed: chooses the tensors.
        backbone: B, the target's hidden size.
        hidden: the assistant's own.
        vocab: the number of ids.
        layers: all sliding, but for the last.
        head_dim: of sliding layers, the target's.
        global_head_dim: of full layers, the target's.
        heads: of queries.
        kv_heads: the target's.
        global_kv_heads: the target's in full layers with k = v; None: as kv_heads.
        sliding_window: the target's.
        centroids: their number, which divides vocab; None: a dense head.
        top_centroids: how many of them are looked into.

    Returns:
        The tensors by name, and the config.
    """
    types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    inner = 2 * hidden
    text: dict[str, Any] = {
        "model_type": "gemma4_text",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "layer_types": types,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": global_kv_heads,
        "attention_k_eq_v": global_kv_heads is not None,
        "head_dim": head_dim,
        "global_head_dim": global_head_dim,
        "num_kv_shared_layers": layers,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "vocab_size": vocab,
        "sliding_window": sliding_window,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "final_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    config: dict[str, Any] = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": centroids is not None,
        "num_centroids": centroids or 2048,
        "centroid_intermediate_top_k": top_centroids if centroids else 32,
        "tie_word_embeddings": True,
        "text_config": text,
    }
    draws = Draws(seed)
    tensors: dict[str, NDArray[Any]] = {
        "pre_projection.weight": draws.matrix(hidden, 2 * backbone),
        "post_projection.weight": draws.matrix(backbone, hidden),
        "model.embed_tokens.weight": draws.vector(vocab, hidden),
        "model.norm.weight": draws.scale(hidden),
    }
    for index, kind in enumerate(types):
        size = head_dim if kind == "sliding_attention" else global_head_dim
        block = _block(draws, hidden, inner, heads, size)
        for name, tensor in block.items():
            tensors[f"model.layers.{index}.{name}"] = tensor
    if centroids is not None:
        tensors["masked_embedding.centroids.weight"] = draws.matrix(centroids, hidden)
        tensors["masked_embedding.token_ordering"] = draws.ordering(vocab)
    write_folder(folder, config, tensors)
    return tensors, config


def _block(
    draws: Draws, hidden: int, inner: int, heads: int, size: int
) -> dict[str, NDArray[Any]]:
    matrices = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    return {
        **{f"{name}.weight": draws.matrix(*shape) for name, shape in matrices.items()},
        **{f"{name}.weight": draws.scale(hidden) for name in norms},
        "self_attn.q_norm.weight": draws.scale(size),
        "layer_scalar": draws.scale(1),
    }


def centroid_logits(
    tensors: Tensors, config: dict[str, Any], y: Array
) -> tuple[Array, Ids]:
    """Return logits [V] for a state [h], and the ids looked at."""
    embedding = weight(tensors, "model.embed_tokens.weight")
    if not config["use_ordered_embeddings"]:
        return embedding @ y, np.arange(len(embedding))
    scores = weight(tensors, "masked_embedding.centroids.weight") @ y
    best = np.argsort(-scores)[: config["centroid_intermediate_top_k"]]
    ordering = np.asarray(tensors["masked_embedding.token_ordering"], dtype=np.int64)
    chosen = ordering.reshape(config["num_centroids"], -1)[best].reshape(-1)
    found = embedding[chosen] @ y
    logits = np.full(len(embedding), found.min() - 1)
    logits[chosen] = found
    return logits, np.sort(chosen)
