"""An EAGLE-3 drafter: one layer that reads features of three target layers.

Slot i takes the target's features at position i and the token at position i + 1, and
its logits are for the token at i + 2 (Li et al., EAGLE-3, arXiv 2503.01840).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from support.references.numerics import (
    Array,
    Ids,
    Tensors,
    attend,
    below,
    causal_mask,
    gated_mlp,
    join_heads,
    linear,
    rms_norm,
    split_heads,
    weight,
)
from support.references.rope import inverse_frequencies, llama3_frequencies, rotate
from support.references.tiny_files import Draws, write_folder

Convention = Literal["specforge", "vllm", "authors", "speculators"]


@dataclass(frozen=True, slots=True)
class Eagle3Rows:
    """What the drafter gives for each slot.

    Attributes:
        logits: [n, draft vocabulary].
        recycled: [n, H], which the next draft step takes in place of features.
    """

    logits: Array
    recycled: Array


def feature_layers(config: dict[str, Any], target_layers: int) -> list[int]:
    """Return the target layers, from 0, whose outputs are the features.

    A list inside eagle_config holds layer numbers. A list at the top of the config
    counts the embeddings as 0, so the output of layer i is i + 1.
    """
    inner = config.get("eagle_config", {})
    if "eagle_aux_hidden_state_layer_ids" in inner:
        return list(inner["eagle_aux_hidden_state_layer_ids"])
    if "eagle_aux_hidden_state_layer_ids" in config:
        return [index - 1 for index in config["eagle_aux_hidden_state_layer_ids"]]
    return [1, target_layers // 2 - 1, target_layers - 4]


def project(tensors: Tensors, config: dict[str, Any], features: Array) -> Array:
    """Turn features [n, 3 Ht], low to high, into states [n, H]."""
    tensors, eps = _plain(tensors), _layer_config(config)["rms_norm_eps"]
    if "fc_norm.0.weight" in tensors:
        parts = [
            rms_norm(part, weight(tensors, f"fc_norm.{index}.weight"), eps)
            for index, part in enumerate(np.split(features, 3, axis=-1))
        ]
        features = np.concatenate(parts, axis=-1)
    if "input_norm.weight" in tensors:
        features = rms_norm(features, weight(tensors, "input_norm.weight"), eps)
    return linear(tensors, "fc", features)


def rows(
    tensors: Tensors,
    config: dict[str, Any],
    states: Array,
    tokens: Ids,
    *,
    embedding: Array,
    head: Array,
) -> Eagle3Rows:
    """Run the drafter over a whole history.

    Args:
        tensors: the drafter's, under their names on disk.
        config: its config.json.
        states: [n, H], from `project` or recycled; they may be mixed.
        tokens: [n], the token after each state.
        embedding: [V, H], the target's, used where the drafter has none.
        head: [V, H], the target's, used where the drafter has none.
    """
    tensors, layer = _plain(tensors), _layer_config(config)
    eps = layer["rms_norm_eps"]
    table = tensors.get("embed_tokens.weight", embedding)
    embedded = np.asarray(table, dtype=np.float64)[tokens]
    block = below(tensors, "midlayer.") or below(tensors, "layers.0.")
    normed = rms_norm(states, weight(block, "hidden_norm.weight"), eps)
    first = rms_norm(embedded, weight(block, "input_layernorm.weight"), eps)
    # Speculators' files take the normed states as the residual unless they say no.
    before = config.get("norm_before_residual", "speculators_model_type" in config)
    x = normed if before else states
    x = x + _attention(block, layer, np.concatenate([first, normed], axis=-1))
    after = rms_norm(x, weight(block, "post_attention_layernorm.weight"), eps)
    x = x + gated_mlp(block, "mlp.", after)
    y = rms_norm(x, weight(tensors, "norm.weight"), eps)
    own = np.asarray(tensors.get("lm_head.weight", head), dtype=np.float64)
    return Eagle3Rows(
        logits=y @ own.T, recycled=y if config.get("norm_output", False) else x
    )


def forward(
    tensors: Tensors,
    config: dict[str, Any],
    features: Array,
    tokens: Ids,
    *,
    embedding: Array,
    head: Array,
) -> Eagle3Rows:
    """Run the drafter over features [n, 3 Ht] and tokens [n]; see `rows`."""
    states = project(tensors, config, features)
    return rows(tensors, config, states, tokens, embedding=embedding, head=head)


def draft(
    tensors: Tensors,
    config: dict[str, Any],
    features: Array,
    tokens: Ids,
    count: int,
    *,
    embedding: Array,
    head: Array,
) -> list[int]:
    """Draft greedily after a history, as ids of the target.

    Each step adds a slot of the last recycled state and the last drafted token.
    """
    states, drafted = project(tensors, config, features), []
    for _ in range(count):
        out = rows(tensors, config, states, tokens, embedding=embedding, head=head)
        drafted.append(int(to_target(tensors, np.argmax(out.logits[-1:], axis=-1))[0]))
        states = np.concatenate([states, out.recycled[-1:]])
        tokens = np.append(tokens, drafted[-1])
    return drafted


def to_target(tensors: Tensors, ids: Ids) -> Ids:
    """Turn ids of the draft vocabulary into ids of the target's."""
    if "d2t" not in tensors:
        return ids
    return ids + np.asarray(tensors["d2t"], dtype=np.int64)[ids]


def scattered(tensors: Tensors, logits: Array, vocab: int) -> Array:
    """Spread logits [n, draft vocabulary] over [n, vocab]; others are -inf."""
    wide = np.full((logits.shape[0], vocab), -np.inf)
    wide[:, to_target(tensors, np.arange(logits.shape[1]))] = logits
    return wide


def write_tiny(
    folder: Path,
    seed: int,
    *,
    convention: Convention = "specforge",
    hidden: int = 64,
    target_hidden: int = 64,
    target_layers: int = 8,
    vocab: int = 256,
    draft_vocab: int | None = 64,
    layer_ids: list[int] | None = None,
    own_embedding: bool = False,
    own_head: bool = True,
    feature_norms: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool | None = None,
    rope_scaling: dict[str, Any] | None = None,
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Write a random drafter in the layout of a real one.

    Args:
        folder: where config.json and model.safetensors go.
        seed: chooses the tensors.
        convention: whose config keys and tensor names. specforge: layer numbers in
            eagle_config, midlayer; vllm: tuple indices at the top, layers.0;
            authors: no layers named, midlayer; speculators: the layer's config in
            transformer_layer_config, tuple indices at the top, layers.0.
        hidden: H.
        target_hidden: Ht.
        target_layers: the number of the target's layers.
        vocab: the number of the target's ids.
        draft_vocab: the number of the drafter's ids; None: all, and no d2t.
        layer_ids: the target layers read, from 0; None: the usual three.
        own_embedding: whether the file has an embedding.
        own_head: whether it has an lm_head; false needs draft_vocab=None.
        feature_norms: whether each feature has a norm of its own before fc.
        norm_output: whether the recycled state is normed.
        norm_before_residual: written to the config unless None.
        rope_scaling: written to the config unless None.

    Returns:
        The tensors by name, and the config.
    """
    layer = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "vocab_size": vocab,
    }
    if rope_scaling is not None:
        layer["rope_scaling"] = rope_scaling
    ids = layer_ids or [1, target_layers // 2 - 1, target_layers - 4]
    config = _config(convention, layer, ids, named=layer_ids is not None)
    config["draft_vocab_size"] = draft_vocab or vocab
    config["target_hidden_size"] = target_hidden
    if norm_before_residual is not None:
        config["norm_before_residual"] = norm_before_residual
    if feature_norms:
        config["fc_norm"] = True
    if norm_output:
        config["norm_output"] = True
    draws = Draws(seed)
    name = "midlayer" if convention in ("specforge", "authors") else "layers.0"
    tensors = _block(draws, f"{name}.", layer)
    tensors["fc.weight"] = draws.matrix(hidden, 3 * target_hidden)
    tensors["norm.weight"] = draws.scale(hidden)
    if draft_vocab is not None:
        chosen = np.sort(draws.ordering(vocab)[:draft_vocab])
        tensors["d2t"] = chosen - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(vocab), chosen)
    if own_head:
        tensors["lm_head.weight"] = draws.matrix(draft_vocab or vocab, hidden)
    if own_embedding:
        tensors["embed_tokens.weight"] = draws.vector(vocab, hidden)
    if feature_norms:
        for index in range(3):
            tensors[f"fc_norm.{index}.weight"] = draws.scale(target_hidden)
    write_folder(folder, config, tensors)
    return tensors, config


def _config(
    convention: Convention, layer: dict[str, Any], ids: list[int], *, named: bool
) -> dict[str, Any]:
    """Return the config of a convention, with the layers read where it has them."""
    key = "eagle_aux_hidden_state_layer_ids"
    tuple_ids = [index + 1 for index in ids]
    if convention == "specforge":
        inner = {"use_aux_hidden_state": True, key: ids}
        return {
            **layer,
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": inner,
        }
    if convention == "vllm":
        return {**layer, "architectures": ["Eagle3LlamaForCausalLM"], key: tuple_ids}
    if convention == "authors":
        if named:
            raise ValueError("the authors' config names no layers: use another")
        return {**layer, "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3},
            ],
        },
        "transformer_layer_config": layer,
        key: tuple_ids,
    }


def _block(draws: Draws, prefix: str, layer: dict[str, Any]) -> dict[str, NDArray[Any]]:
    size, inner, hd = layer["hidden_size"], layer["intermediate_size"], 16
    queries = layer["num_attention_heads"] * hd
    keys = layer["num_key_value_heads"] * hd
    matrices = {
        "self_attn.q_proj": (queries, 2 * size),
        "self_attn.k_proj": (keys, 2 * size),
        "self_attn.v_proj": (keys, 2 * size),
        "self_attn.o_proj": (size, queries),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        **{f"{prefix}{k}.weight": draws.matrix(*v) for k, v in matrices.items()},
        **{f"{prefix}{k}.weight": draws.scale(size) for k in norms},
    }


def _layer_config(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config.get("transformer_layer_config", config))


def _plain(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _attention(block: Tensors, layer: dict[str, Any], x: Array) -> Array:
    """Attend causally from [n, 2 H] to [n, H]."""
    heads, kv_heads = layer["num_attention_heads"], layer["num_key_value_heads"]
    dims = layer.get("head_dim") or layer["hidden_size"] // heads
    scaling = layer.get("rope_scaling")
    if scaling is None:
        angles = inverse_frequencies(dims, layer["rope_theta"])
    elif scaling.get("rope_type") == "llama3":
        angles = llama3_frequencies(dims, layer["rope_theta"], scaling)
    else:
        raise ValueError(f"no reference for rope scaling {scaling}")
    positions = np.arange(x.shape[0])
    queries = split_heads(linear(block, "self_attn.q_proj", x), heads)
    keys = split_heads(linear(block, "self_attn.k_proj", x), kv_heads)
    values = split_heads(linear(block, "self_attn.v_proj", x), kv_heads)
    mixed = attend(
        rotate(queries, positions, angles, pairs=False),
        rotate(keys, positions, angles, pairs=False),
        values,
        scale=dims**-0.5,
        mask=causal_mask(x.shape[0]),
    )
    return linear(block, "self_attn.o_proj", join_heads(mixed))
