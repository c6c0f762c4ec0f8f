"""Folders with a target and a reference's head, in the layout of published ones."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from support.models.tiny_models import randomise
from support.references.mtp.base import Family, Named, make_tensors
from support.references.tiny_files import write_folder

Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class MtpFolder:
    """A target with a head.

    Attributes:
        path: its folder.
        model: the target, with the weights of the folder.
        tensors: the head's tensors, under their names on disk.
        embedding: [V, H], the target's.
        head: [V, H], the target's output matrix.
    """

    path: Path
    model: nn.Module
    tensors: Named
    embedding: NDArray[np.float32]
    head: NDArray[np.float32]


def write_mtp_folder(path: Path, family: Family, seed: int) -> MtpFolder:
    """Write a random target of a family with a random head, and build the target.

    Args:
        path: the folder to make.
        family: gives names, shapes and configuration.
        seed: chooses the weights.
    """
    model = build_target(family, seed)
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    trunk = {name: np.array(value) for name, value in parameters}
    ends = {
        name.rsplit(".", 2)[-2]: value
        for name, value in trunk.items()
        if name.endswith("weight") and name.rsplit(".", 2)[-2] in _ENDS
    }
    embedding = next(ends[name] for name in _EMBEDDINGS if name in ends)
    head = ends.get("lm_head", embedding)
    tensors = make_tensors(family, seed, embedding=embedding, head=head)
    raw = _RAW.get(family.module, dict)(trunk)
    write_folder(path, family.config, {**raw, **tensors})
    return MtpFolder(path, model, tensors, embedding, head)


def build_target(family: Family, seed: int) -> nn.Module:
    """Build the target of a family with random weights."""
    module = importlib.import_module(f"mlx_lm.models.{family.module}")
    mx.random.seed(seed)  # The constructors draw from the global generator.
    config = {**family.config}
    model = cast(nn.Module, module.Model(module.ModelArgs.from_dict(config)))
    randomise(model, embedding=0.25)
    return model


_EMBEDDINGS = ("embed_tokens", "word_embeddings", "embeddings")
_ENDS = (*_EMBEDDINGS, "lm_head")


def _raw_qwen(trunk: Tensors) -> Tensors:
    """Undo mlx-lm's changes to Qwen's files: norms, convolutions, experts."""
    raw: Tensors = {}
    for name, value in trunk.items():
        place = name.replace("language_model.model.", "model.language_model.")
        place = place.removeprefix("language_model.")
        if name.endswith(_QWEN_NORMS):
            raw[place] = value - 1
        elif "conv1d.weight" in name:
            raw[place] = np.ascontiguousarray(np.moveaxis(value, 1, 2))
        elif ".switch_mlp." not in name:
            raw[place] = value
    return raw


_QWEN_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)


def _raw_qwen_next(trunk: Tensors) -> Tensors:
    raw = _raw_qwen(trunk)
    for name, value in trunk.items():
        if ".switch_mlp." in name:
            for index, expert in enumerate(value):
                raw[name.replace(".switch_mlp.", f".experts.{index}.")] = expert.copy()
    return raw


def _raw_qwen_fused(trunk: Tensors) -> Tensors:
    raw = _raw_qwen(trunk)
    for name, value in trunk.items():
        if ".switch_mlp.down_proj" in name:
            place = name.replace("language_model.model.", "model.language_model.")
            prefix = place.split("switch_mlp.")[0] + "experts."
            raw[f"{prefix}down_proj"] = value
            gate, up = (
                trunk[name.replace("down_proj", which)]
                for which in ("gate_proj", "up_proj")
            )
            raw[f"{prefix}gate_up_proj"] = np.concatenate([gate, up], axis=1)
    return raw


def _raw_step(trunk: Tensors) -> Tensors:
    """Undo mlx-lm's changes to Step's files: norms, and the names of experts."""
    raw: Tensors = {}
    for name, value in trunk.items():
        place = name
        for theirs, ours in _STEP_NAMES.items():
            place = place.replace(ours, theirs)
        is_norm = "norm" in name and name.endswith(".weight")
        raw[place] = value - 1 if is_norm else value
    return raw


_STEP_NAMES = {
    ".moe.gate_proj.": ".mlp.switch_mlp.gate_proj.",
    ".moe.up_proj.": ".mlp.switch_mlp.up_proj.",
    ".moe.down_proj.": ".mlp.switch_mlp.down_proj.",
    ".moe.gate.": ".mlp.gate.gate.",
    ".moe.router_bias": ".mlp.gate.router_bias",
    ".share_expert.": ".mlp.share_expert.",
}

_RAW: dict[str, Callable[[Tensors], Tensors]] = {
    "qwen3_5": _raw_qwen,
    "qwen3_5_moe": _raw_qwen_fused,
    "qwen3_next": _raw_qwen_next,
    "step3p5": _raw_step,
}
