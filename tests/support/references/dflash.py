"""A DFlash drafter: a block of tokens in one pass, over a context of features.

Row 0 of a block is the newest token, the others are masks; row j predicts the token
at its own position. Block rows see the whole context and each other.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.references.numerics import (
    Array,
    Mask,
    Tensors,
    attend,
    below,
    gated_mlp,
    join_heads,
    linear,
    rms_norm,
    split_heads,
    weight,
)
from support.references.rope import inverse_frequencies, rotate
from support.references.tiny_files import Draws, write_folder


def feature_layers(config: dict[str, Any], count: int, target_layers: int) -> list[int]:
    """Return the target layers, from 0, whose outputs are the context's features.

    Args:
        config: the drafter's config.json.
        count: how many fc takes, where the config names none.
        target_layers: N of the target.
    """
    named = config.get("dflash_config", {}).get("target_layer_ids")
    if named is not None:
        return list(named)
    if "aux_hidden_state_layer_ids" in config:
        return [index - 1 for index in config["aux_hidden_state_layer_ids"]]
    step = (target_layers - 4) / (count - 1)
    return [round(1 + index * step) for index in range(count)]


def context_states(tensors: Tensors, config: dict[str, Any], features: Array) -> Array:
    """Turn features [n, L Ht] into context states [n, H], row by row."""
    tensors = _plain(tensors)
    scale = weight(tensors, "hidden_norm.weight")
    return rms_norm(linear(tensors, "fc", features), scale, config["rms_norm_eps"])


def block_mask(
    config: dict[str, Any], layer: int, context: int, block: int, *, start: int = 0
) -> Mask:
    """Return what a block row sees: [block, context + block].

    Args:
        config: the drafter's config.json.
        layer: of the drafter, from 0.
        context: the number of context rows, at positions start, start + 1, ...
        block: the number of block rows, at the positions after the context.
        start: the first position.

    A full layer sees everything. In a sliding one a row at p sees what lies after
    p - window, and of its own block only what lies at or before p, unless
    dflash_config says that it is not causal.
    """
    types = config.get("layer_types") or ["full_attention"] * (layer + 1)
    if types[layer] == "full_attention":
        return np.ones((block, context + block), dtype=np.bool_)
    keys = start + np.arange(context + block)[None, :]
    queries = start + context + np.arange(block)[:, None]
    seen = keys > queries - config["sliding_window"]
    if config.get("dflash_config", {}).get("causal", True):
        seen = seen & (keys <= queries)
    return np.asarray(seen)


def forward(
    tensors: Tensors,
    config: dict[str, Any],
    features: Array,
    block: Array,
    *,
    head: Array,
    start: int = 0,
) -> Array:
    """Return logits [block rows, V] for one block.

    Args:
        tensors: the drafter's, under their names on disk.
        config: its config.json.
        features: [n, L Ht], the target's layer outputs at n consecutive positions.
        block: [block rows, H], the target's embeddings of the newest token and of
            the mask token.
        head: [V, H], the target's.
        start: the position of the first context row.
    """
    tensors, eps = _plain(tensors), config["rms_norm_eps"]
    context, x = context_states(tensors, config, features), block
    for index in range(config["num_hidden_layers"]):
        layer = below(tensors, f"layers.{index}.")
        mask = block_mask(config, index, len(context), len(block), start=start)
        normed = rms_norm(x, weight(layer, "input_layernorm.weight"), eps)
        x = x + _attention(layer, config, context, normed, mask, start)
        normed = rms_norm(x, weight(layer, "post_attention_layernorm.weight"), eps)
        x = x + gated_mlp(layer, "mlp.", normed)
    return rms_norm(x, weight(tensors, "norm.weight"), eps) @ head.T


def write_tiny(
    folder: Path,
    seed: int,
    *,
    hidden: int = 64,
    target_hidden: int = 64,
    target_layers: int = 8,
    vocab: int = 256,
    layers: int = 2,
    block_size: int = 4,
    layer_types: list[str] | None = None,
    sliding_window: int | None = None,
    causal: bool | None = None,
    target_layer_ids: list[int] | None = None,
    name_layers: bool = True,
    prefix: str = "",
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Write a random drafter in the layout of a real one.

    Args:
        folder: where config.json and model.safetensors go.
        seed: chooses the tensors.
        hidden: H, the target's too, since it lends embedding and head.
        target_hidden: Ht.
        target_layers: N of the target.
        vocab: the number of ids; the last is the mask token.
        layers: of the drafter.
        block_size: with the newest token.
        layer_types: "full_attention" or "sliding_attention" for each layer.
        sliding_window: the window of sliding layers.
        causal: written into dflash_config unless None.
        target_layer_ids: the target layers read; None: three, by the usual rule.
        name_layers: whether the config says which.
        prefix: before every name: "" or "model.".

    Returns:
        The tensors by name, and the config.
    """
    heads, kv_heads, hd, inner = 4, 2, 16, 2 * hidden
    ids = target_layer_ids or feature_layers({}, 3, target_layers)
    inner_config: dict[str, Any] = {"mask_token_id": vocab - 1}
    if name_layers:
        inner_config["target_layer_ids"] = ids
    if causal is not None:
        inner_config["causal"] = causal
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hd,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "vocab_size": vocab,
        "block_size": block_size,
        "num_target_layers": target_layers,
        "layer_types": layer_types or ["full_attention"] * layers,
        "sliding_window": sliding_window,
        "use_sliding_window": sliding_window is not None,
        "tie_word_embeddings": False,
        "dflash_config": inner_config,
    }
    draws = Draws(seed)
    tensors: dict[str, NDArray[Any]] = {
        "fc.weight": draws.matrix(hidden, len(ids) * target_hidden),
        "hidden_norm.weight": draws.scale(hidden),
        "norm.weight": draws.scale(hidden),
    }
    matrices = {
        "self_attn.q_proj": (heads * hd, hidden),
        "self_attn.k_proj": (kv_heads * hd, hidden),
        "self_attn.v_proj": (kv_heads * hd, hidden),
        "self_attn.o_proj": (hidden, heads * hd),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_norm": hd,
        "self_attn.k_norm": hd,
    }
    for index in range(layers):
        place = f"layers.{index}."
        for name, shape in matrices.items():
            tensors[f"{place}{name}.weight"] = draws.matrix(*shape)
        for name, size in norms.items():
            tensors[f"{place}{name}.weight"] = draws.scale(size)
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    write_folder(folder, config, tensors)
    return tensors, config


def _plain(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _attention(
    layer: Tensors,
    config: dict[str, Any],
    context: Array,
    block: Array,
    mask: Mask,
    start: int,
) -> Array:
    """Attend from normed block rows to context rows, as they are, and the block."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    eps, hd = config["rms_norm_eps"], config["head_dim"]
    angles = inverse_frequencies(hd, config["rope_theta"])
    read = np.concatenate([context, block])
    positions = start + np.arange(len(read))
    queries = split_heads(linear(layer, "self_attn.q_proj", block), heads)
    keys = split_heads(linear(layer, "self_attn.k_proj", read), kv_heads)
    values = split_heads(linear(layer, "self_attn.v_proj", read), kv_heads)
    queries = rms_norm(queries, weight(layer, "self_attn.q_norm.weight"), eps)
    keys = rms_norm(keys, weight(layer, "self_attn.k_norm.weight"), eps)
    mixed = attend(
        rotate(queries, positions[len(context) :], angles, pairs=False),
        rotate(keys, positions, angles, pairs=False),
        values,
        scale=hd**-0.5,
        mask=mask,
    )
    return linear(layer, "self_attn.o_proj", join_heads(mixed))
