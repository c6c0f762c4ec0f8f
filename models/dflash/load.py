"""Loading a DFlash drafter: a folder in, a module out."""

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Weights,
    biased,
    load_into,
    read_tensors,
    rows_of,
    take_draft_ids,
)
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.dflash.config import (
    NAME,
    DFlashSettings,
    read_settings,
    tapped_layers,
)
from mlx_speculation.models.dflash.head import DFlashHead
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.token_ids import logit_width


class LoadedDFlash(NamedTuple):
    """A drafter, and what it reads.

    Attributes:
        head: the drafter.
        layers: of the target, whose outputs it reads.
    """

    head: DFlashHead
    layers: tuple[int, ...]


def load_dflash(folder: str | Path, model: nn.Module) -> LoadedDFlash:
    """Load the DFlash drafter in a folder of its own.

    Args:
        folder: the drafter's, with config.json and safetensors.
        model: its target.

    Returns:
        The drafter; on a Linux CPU in float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: it is no such drafter, not complete, or not of this target.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    settings = read_settings(config)
    _check_files(folder)
    parts = find_parts(model)
    parts.require("layers", "norm")
    weights = read_tensors(folder, NAME)
    layers = tapped_layers(config, len(parts.layers), _features(weights, parts.dim))
    vocab = logit_width(model)
    ids = take_draft_ids(weights, vocab, NAME)
    _check(settings, weights, parts.dim, ids, vocab)
    head = DFlashHead(
        settings,
        len(layers),
        parts.dim,
        ids=ids,
        output=rows_of(weights, "lm_head"),
        embedding=rows_of(weights, "embed_tokens"),
        biases=biased(weights),
    )
    load_into(head, weights, NAME)
    return LoadedDFlash(head, layers)


def _check_files(folder: Path) -> None:
    extra = next(iter(folder.glob("mask_embedding*")), None)
    if extra is not None:
        raise ModelFolderError(
            f"The folder of the {NAME} has {extra.name}: its mask is no token, which "
            "is not known here. Choose another drafter."
        )


def _features(weights: Weights, dim: int) -> int | None:
    """Return how many layers of the target `fc` takes, where its shape tells."""
    wide = weights.get("fc.weight")
    if wide is None or "fc.scales" in weights:
        return None
    if wide.shape[-1] % dim:
        raise ModelFolderError(
            f"fc of the {NAME} takes {wide.shape[-1]} numbers, and layers of this "
            f"target have {dim} each. Choose the drafter of this target."
        )
    return int(wide.shape[-1] // dim)


def _check(
    settings: DFlashSettings,
    weights: Weights,
    dim: int,
    ids: mx.array | None,
    vocab: int,
) -> None:
    """Refuse a drafter that is not of this target."""
    own = settings.sizes.dim
    for end, name in (("embed_tokens", "embedding"), ("lm_head", "output layer")):
        if f"{end}.weight" not in weights and own != dim:
            raise ModelFolderError(
                f"config.json of the {NAME} says hidden_size {own}, and without an "
                f"{name} of its own it has to be the target's, {dim}. Choose the "
                "drafter of this target."
            )
    columns = rows_of(weights, "lm_head") or vocab
    if columns != (vocab if ids is None else ids.size):
        told = "no d2t" if ids is None else f"a d2t of {ids.size}"
        raise ModelFolderError(
            f"The {NAME} has {columns} columns of logits and {told}, and the target "
            f"{vocab} ids. Take a whole checkpoint of this target's drafter."
        )
    rows = rows_of(weights, "embed_tokens") or vocab
    if settings.mask_token >= rows:
        raise ModelFolderError(
            f"config.json of the {NAME} says mask_token_id {settings.mask_token}, and "
            f"there are {rows} embeddings. Choose the drafter of this target."
        )
