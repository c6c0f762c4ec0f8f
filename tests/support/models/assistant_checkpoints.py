"""Tiny Gemma 4 assistants for tiny targets, in memory and as files.

The last layers of the target "shared" share keys and values. The full layers of
"unshared" have larger heads, and use keys as values.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_speculation.models.gemma_assistant import Assistant
from mlx_speculation.models.gemma_assistant.config import read_assistant_settings
from support.models.tiny_models import TINY_MODELS, TinyModel, build_tiny, randomise

SLIDING, FULL = "sliding_attention", "full_attention"
_GEMMA4 = TINY_MODELS["gemma4_text"]
_UNSHARED = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING],
}
TARGETS: dict[str, TinyModel] = {
    "shared": _GEMMA4,
    "unshared": replace(_GEMMA4, args={**_GEMMA4.args, **_UNSHARED}),
    "gemma3": TINY_MODELS["gemma3_text"],
}
# Attention heads that are wide enough for quantized caches.
_WIDE = {"head_dim": 32, "global_head_dim": 32, "attention_k_eq_v": False}
QUANTIZABLE = replace(_GEMMA4, args={**_GEMMA4.args, **_UNSHARED, **_WIDE})
# The same with full attention alone, since caches of windows cannot be quantized.
FULL_ONLY = replace(QUANTIZABLE, args={**QUANTIZABLE.args, "layer_types": [FULL] * 5})
# As in real checkpoints, with the text model inside a larger model.
WRAPPED = replace(
    _GEMMA4,
    module="gemma4",
    args={"model_type": "gemma4", "vocab_size": 256, "text_config": _GEMMA4.args},
)
_ALL = {
    **TARGETS,
    "quantizable": QUANTIZABLE,
    "full": FULL_ONLY,
    "wrapped": WRAPPED,
}
HEADS = ("dense", "centroids")
DIM, VOCAB, WINDOW = 64, 256, 16


@dataclass(frozen=True, slots=True)
class Made:
    target: nn.Module
    assistant: Assistant
    config: dict[str, Any]


@cache
def target_of(name: str) -> nn.Module:
    return build_tiny(_ALL[name])


def config_of(name: str, head: str = "dense", **text: Any) -> dict[str, Any]:
    """Return an assistant's config.json; `text` replaces values of its text_config."""
    args = _ALL[name].args
    args = args.get("text_config", args)
    proportional = name != "gemma3"
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if proportional:
        full = {**full, "rope_type": "proportional", "partial_rotary_factor": 0.25}
    ours = {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 32,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": [FULL if name == "full" else SLIDING] * 3 + [FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": args["num_key_value_heads"],
        "num_global_key_value_heads": args.get("num_global_key_value_heads"),
        "head_dim": args["head_dim"],
        "global_head_dim": args.get("global_head_dim", args["head_dim"]),
        "sliding_window": args["sliding_window"],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: full,
        },
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "vocab_size": VOCAB,
        "attention_bias": False,
        "attention_k_eq_v": bool(args.get("attention_k_eq_v")),
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        **text,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": DIM,
        "use_ordered_embeddings": head == "centroids",
        "num_centroids": 16,
        "centroid_intermediate_top_k": 3,
        "tie_word_embeddings": True,
        "text_config": ours,
    }


@cache
def make(name: str, head: str = "dense") -> Made:
    config = config_of(name, head)
    return Made(target_of(name), build(config), config)


def build(config: dict[str, Any]) -> Assistant:
    assistant: Any = Assistant(read_assistant_settings(config))
    mx.random.seed(5)
    randomise(assistant, embedding=0.5)
    if config["use_ordered_embeddings"]:
        order = mx.random.permutation(VOCAB).astype(mx.int64)
        assistant.masked_embedding.token_ordering = order
    assistant.eval()
    mx.eval(assistant.parameters())
    return assistant  # type: ignore[no-any-return]


def tensors_of(assistant: Assistant) -> dict[str, mx.array]:
    """Return an assistant's tensors under the names on disk."""
    module: Any = assistant
    flat: Any = tree_flatten(module.parameters())
    inner = ("embed_tokens.", "layers.", "norm.")
    return {f"model.{n}" if n.startswith(inner) else n: value for n, value in flat}


def write(made: Made, folder: Path, **more: mx.array) -> Path:
    """Write an assistant and the tensors `more` to a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.config), encoding="utf-8")
    tensors = {**tensors_of(made.assistant), **more}
    path = folder / "model.safetensors"
    mx.save_safetensors(str(path), tensors, metadata={"format": "pt"})
    return folder
