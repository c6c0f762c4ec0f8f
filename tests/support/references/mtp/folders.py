"""Folders of heads with random weights, in the layout of published heads."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from support.models.tiny_models import randomise
from support.references.mtp.base import Family, Named, make_tensors
from support.references.tiny_files import write_folder


@dataclass(frozen=True, slots=True)
class MtpFolder:
    """A target in memory, and a folder with its head."""

    path: Path
    model: nn.Module
    tensors: Named  # of the head, under their names on disk
    embedding: NDArray[np.float32]  # the target's, [V, H]
    head: NDArray[np.float32]  # the target's output matrix, [V, H]


def write_mtp_folder(path: Path, family: Family, seed: int) -> MtpFolder:
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
    flag = {"mtp_norm_encoding": "delta"} if family.plus_one else {}
    write_folder(path, {**family.config, **flag}, tensors)
    return MtpFolder(path, model, tensors, embedding, head)


def build_target(family: Family, seed: int) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{family.module}")
    mx.random.seed(seed)  # The constructors draw from the global generator.
    config = {**family.config}
    model = cast(nn.Module, module.Model(module.ModelArgs.from_dict(config)))
    randomise(model, embedding=0.25)
    return model


_EMBEDDINGS = ("embed_tokens", "word_embeddings", "embeddings")
_ENDS = (*_EMBEDDINGS, "lm_head")
