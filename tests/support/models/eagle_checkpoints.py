"""Tiny random EAGLE-3 heads, laid out on disk as real ones are.

eagle_checkpoints.json has a dialect for each publisher. Names of tensors are
written out again here, so that tests notice wrong names in the library.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.models.rows import read_rows

DIM, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 256
DRAFT_VOCAB = 96
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Layout of a publisher's files."""

    architecture: str
    layer: str = "midlayer."  # name of the decoder layer
    # The list of layers. True: at the top of config.json, as indices of transformers'
    # tuple of hidden states; false: in `eagle_config`, as layers from 0; None: no list.
    tuple_ids: bool | None = False
    reduced: bool = True  # drafts from a part of the ids, with d2t, t2d and lm_head
    embedding: bool = False  # has its own embedding
    speculators: bool = False  # the sizes are in a nested part of config.json
    norms: str = ""  # of the tapped outputs: "each", "old names" or "joined"
    options: Mapping[str, Any] = field(default_factory=dict)  # further keys
    layers: int = 1  # decoder layers
    query_norms: str = ""  # of queries and keys: of "each" head or "together"
    deepspec: bool = False  # the list of layers has DeepSpec's form
    output: bool = False  # has an output layer for all ids
    last: str = ""  # reads the last state alone: "plain" (without `fc`) or "fc"
    biased: bool = False  # attention and `fc` have biases
    gemma: bool = False  # the layer is Gemma 4's
    latent: bool = False  # the attention is DeepSeek's
    mask: str = ""  # key of the mask's id in config.json, for P-EAGLE heads


EVERY = {name: Dialect(**row) for name, row in read_rows(__file__).items()}
# Dialects that only the comparison with the numpy references needs.
_VARIANTS = (
    *("normed residual", "plain residual", "llama3", "sliding"),
    *("last state, projected", "latent"),
)
VARIANTS = {name: EVERY[name] for name in _VARIANTS}
# Heads that draft in one forward.
PARALLEL = {name: each for name, each in EVERY.items() if each.mask}
DIALECTS = {k: v for k, v in EVERY.items() if k not in VARIANTS | PARALLEL}
LLAMA3 = EVERY["llama3"].options["rope_scaling"]
_LATENT = EVERY["latent"].options


def draft_ids() -> list[int]:
    """Return the ids of a reduced vocabulary, in order."""
    order = np.random.default_rng(0).permutation(VOCAB)[:DRAFT_VOCAB]
    return sorted(int(token) for token in order)


def config_of(dialect: Dialect, layers: tuple[int, ...]) -> dict[str, Any]:
    """Return config.json of a head that reads these layers, counted from 0."""
    sizes: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": DIM,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": dialect.layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
    }
    config: dict[str, Any] = {"architectures": [dialect.architecture]}
    if dialect.speculators:
        config |= {
            "speculators_model_type": "peagle" if dialect.mask else "eagle3",
            "transformer_layer_config": sizes,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
        }
    else:
        config |= sizes
    if dialect.reduced:
        config["draft_vocab_size"] = DRAFT_VOCAB
    if dialect.mask:
        config[dialect.mask] = VOCAB - 1
    if dialect.deepspec:
        config["target_layer_ids"] = list(layers)
    elif dialect.last:
        config["eagle_config"] = {"use_aux_hidden_state": False}
    elif dialect.tuple_ids:
        config[_IDS] = [layer + 1 for layer in layers]
    elif dialect.tuple_ids is not None:
        config["eagle_config"] = {"use_aux_hidden_state": True, _IDS: list(layers)}
    return config | dict(dialect.options)


def tensors_of(dialect: Dialect, features: int) -> dict[str, mx.array]:
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> mx.array:
        values = rng.standard_normal(shape) * (2.0 / shape[-1] ** 0.5)
        return mx.array(values.astype(np.float32))

    def vector(size: int) -> mx.array:
        return mx.array((1 + 0.3 * rng.standard_normal(size)).astype(np.float32))

    layer, wide, narrow = dialect.layer, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    prefix = "model." if layer.startswith("model.") else ""
    tensors = {
        f"{prefix}fc.weight": matrix(DIM, features * DIM),
        f"{prefix}norm.weight": vector(DIM),
        f"{layer}self_attn.q_proj.weight": matrix(wide, 2 * DIM),
        f"{layer}self_attn.k_proj.weight": matrix(narrow, 2 * DIM),
        f"{layer}self_attn.v_proj.weight": matrix(narrow, 2 * DIM),
        f"{layer}self_attn.o_proj.weight": matrix(DIM, wide),
        f"{layer}mlp.gate_proj.weight": matrix(MLP, DIM),
        f"{layer}mlp.up_proj.weight": matrix(MLP, DIM),
        f"{layer}mlp.down_proj.weight": matrix(DIM, MLP),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = vector(DIM)
    if dialect.embedding:
        tensors[f"{prefix}embed_tokens.weight"] = matrix(VOCAB, DIM)
    if dialect.reduced:
        ids = np.array(draft_ids())
        tensors["lm_head.weight"] = matrix(DRAFT_VOCAB, DIM)
        tensors["d2t"] = mx.array(ids - np.arange(DRAFT_VOCAB))
        tensors["t2d"] = mx.array(np.isin(np.arange(VOCAB), ids))
    if dialect.norms == "each":
        tensors |= {f"fc_norm.{i}.weight": vector(DIM) for i in range(features)}
    elif dialect.norms == "old names":
        names = ("low", "mid", "high")
        tensors |= {f"aux_norm_{name}.weight": vector(DIM) for name in names}
    elif dialect.norms == "joined":
        tensors["input_norm.weight"] = vector(features * DIM)
    for index in range(1, dialect.layers):
        tensors |= _later_layer(f"layers.{index}.", matrix, vector)
    places = [layer, *(f"layers.{index}." for index in range(1, dialect.layers))]
    for place in places if dialect.query_norms else ():
        each = dialect.query_norms == "each"
        for name, size in (("q", wide), ("k", narrow)):
            norm = vector(HEAD_DIM if each else size)
            tensors[f"{place}self_attn.{name}_norm.weight"] = norm
    for place in places if dialect.biased else ():
        for name, size in (("q", wide), ("k", narrow), ("v", narrow), ("o", DIM)):
            tensors[f"{place}self_attn.{name}_proj.bias"] = vector(size)
    if dialect.biased:
        tensors["fc.bias"] = vector(DIM)
    if dialect.output:
        tensors["lm_head.weight"] = matrix(VOCAB, DIM)
    if dialect.last == "plain":
        del tensors["fc.weight"]
    if dialect.latent:
        tensors = {k: v for k, v in tensors.items() if "self_attn" not in k}
        tensors |= _latent(f"{layer}self_attn.", matrix, vector)
    if dialect.mask:
        tensors["mask_hidden"] = matrix(1, 1, features * DIM)
    if dialect.gemma:
        tensors |= _gemma_layer(layer, matrix, vector)
        del tensors[f"{layer}self_attn.v_proj.weight"]
    return tensors


def _later_layer(place: str, matrix: Any, vector: Any) -> dict[str, mx.array]:
    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (wide, DIM),
        "self_attn.k_proj": (narrow, DIM),
        "self_attn.v_proj": (narrow, DIM),
        "self_attn.o_proj": (DIM, wide),
        "mlp.gate_proj": (MLP, DIM),
        "mlp.up_proj": (MLP, DIM),
        "mlp.down_proj": (DIM, MLP),
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return {
        **{f"{place}{name}.weight": matrix(*shape) for name, shape in shapes.items()},
        **{f"{place}{name}.weight": vector(DIM) for name in norms},
    }


def _gemma_layer(place: str, matrix: Any, vector: Any) -> dict[str, mx.array]:
    size, attention = 2 * HEAD_DIM, f"{place}self_attn."
    norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return {
        f"{attention}q_proj.weight": matrix(HEADS * size, 2 * DIM),
        f"{attention}k_proj.weight": matrix(size, 2 * DIM),
        f"{attention}o_proj.weight": matrix(DIM, HEADS * size),
        f"{attention}q_norm.weight": vector(size),
        f"{attention}k_norm.weight": vector(size),
        **{f"{place}{name}.weight": vector(DIM) for name in norms},
        f"{place}layer_scalar": vector(1),
    }


def _latent(attention: str, matrix: Any, vector: Any) -> dict[str, mx.array]:
    rank, narrow = _LATENT["kv_lora_rank"], _LATENT["q_lora_rank"]
    nope, turned = _LATENT["qk_nope_head_dim"], _LATENT["qk_rope_head_dim"]
    values = _LATENT["v_head_dim"]
    shapes = {
        "q_a_proj": (narrow, 2 * DIM),
        "q_b_proj": (HEADS * (nope + turned), narrow),
        "kv_a_proj_with_mqa": (rank + turned, 2 * DIM),
        "kv_b_proj": (HEADS * (nope + values), rank),
        "o_proj": (DIM, HEADS * values),
    }
    return {
        **{f"{attention}{name}.weight": matrix(*s) for name, s in shapes.items()},
        f"{attention}q_a_layernorm.weight": vector(narrow),
        f"{attention}kv_a_layernorm.weight": vector(rank),
    }


def write_eagle(
    folder: Path, name: str | Dialect, layers: tuple[int, ...] = (0, 1, 3)
) -> Path:
    dialect = EVERY[name] if isinstance(name, str) else name
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(config_of(dialect, layers))
    (folder / "config.json").write_text(config, encoding="utf-8")
    tensors = tensors_of(dialect, len(layers))
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, metadata={"format": "pt"}
    )
    return folder
