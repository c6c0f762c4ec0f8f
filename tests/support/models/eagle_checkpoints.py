"""Tiny random EAGLE-3 heads, laid out on disk as real ones are.

One dialect for each public origin of such heads. The names of tensors stand here a
second time, so that a wrong name in the library does not go unnoticed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

DIM, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 256
DRAFT_VOCAB = 96
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the files of an origin look.

    Attributes:
        architecture: what config.json says.
        layer: the name of the decoder layer.
        tuple_ids: whether config.json has the list at its top, as tuple indices; None:
            it has no list.
        reduced: whether it drafts from a part of the ids, with d2t, t2d and lm_head.
        embedding: whether it has one of its own.
        speculators: whether the sizes stand in a part of their own.
        norms: of the layers' outputs: "", "each", "old names" or "joined".
        options: further keys of config.json.
    """

    architecture: str
    layer: str = "midlayer."
    tuple_ids: bool | None = False
    reduced: bool = True
    embedding: bool = False
    speculators: bool = False
    norms: str = ""
    options: tuple[tuple[str, Any], ...] = ()


DIALECTS = {
    "specforge": Dialect("LlamaForCausalLMEagle3"),
    "vllm": Dialect(
        "Eagle3LlamaForCausalLM", "model.layers.0.", tuple_ids=True, embedding=True
    ),
    "authors": Dialect("LlamaForCausalLM", tuple_ids=None),
    "speculators": Dialect(
        "Eagle3DraftModel",
        "layers.0.",
        tuple_ids=True,
        embedding=True,
        speculators=True,
    ),
    "norm_output": Dialect(
        "LlamaForCausalLMEagle3", norms="each", options=(("norm_output", True),)
    ),
    "old_norms": Dialect("LlamaForCausalLMEagle3", norms="old names"),
    "joined_norm": Dialect(
        "Eagle3LlamaForCausalLM", norms="joined", options=(("norm_before_fc", True),)
    ),
    "whole": Dialect("Eagle3Qwen3ForCausalLM", tuple_ids=True, reduced=False),
}


def draft_ids() -> list[int]:
    """Return the ids of a reduced vocabulary, in order."""
    order = np.random.default_rng(0).permutation(VOCAB)[:DRAFT_VOCAB]
    return sorted(int(token) for token in order)


def config_of(dialect: Dialect, layers: tuple[int, ...]) -> dict[str, Any]:
    """Return config.json of a head that reads these layers of its target, from 0."""
    sizes: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": DIM,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
    }
    config: dict[str, Any] = {"architectures": [dialect.architecture]}
    if dialect.speculators:
        config |= {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": sizes,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
        }
    else:
        config |= sizes
    if dialect.reduced:
        config["draft_vocab_size"] = DRAFT_VOCAB
    if dialect.tuple_ids:
        config[_IDS] = [layer + 1 for layer in layers]
    elif dialect.tuple_ids is not None:
        config["eagle_config"] = {"use_aux_hidden_state": True, _IDS: list(layers)}
    return config | dict(dialect.options)


def tensors_of(dialect: Dialect, features: int) -> dict[str, mx.array]:
    """Return random tensors of a head, under the names of files."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> mx.array:
        values = rng.standard_normal((rows, columns)) * (2.0 / columns**0.5)
        return mx.array(values.astype(np.float32))

    def vector(size: int) -> mx.array:
        return mx.array((1 + 0.3 * rng.standard_normal(size)).astype(np.float32))

    layer, wide, narrow = dialect.layer, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    prefix = "model." if layer.startswith("model.") else ""
    found = {
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
        found[f"{layer}{name}.weight"] = vector(DIM)
    if dialect.embedding:
        found[f"{prefix}embed_tokens.weight"] = matrix(VOCAB, DIM)
    if dialect.reduced:
        ids = np.array(draft_ids())
        found["lm_head.weight"] = matrix(DRAFT_VOCAB, DIM)
        found["d2t"] = mx.array(ids - np.arange(DRAFT_VOCAB))
        found["t2d"] = mx.array(np.isin(np.arange(VOCAB), ids))
    if dialect.norms == "each":
        found |= {f"fc_norm.{i}.weight": vector(DIM) for i in range(features)}
    elif dialect.norms == "old names":
        names = ("low", "mid", "high")
        found |= {f"aux_norm_{name}.weight": vector(DIM) for name in names}
    elif dialect.norms == "joined":
        found["input_norm.weight"] = vector(features * DIM)
    return found


def write_eagle(folder: Path, name: str, layers: tuple[int, ...] = (0, 1, 3)) -> Path:
    """Write a head of a dialect, and return its folder."""
    dialect = DIALECTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(config_of(dialect, layers))
    (folder / "config.json").write_text(config, encoding="utf-8")
    tensors = tensors_of(dialect, len(layers))
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, metadata={"format": "pt"}
    )
    return folder
