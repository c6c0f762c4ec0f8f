"""Loading a DFlash drafter: a folder in, a module out."""

from pathlib import Path
from typing import NamedTuple

import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import load_into, read_tensors
from mlx_speculation.models.checkpoints.joined_head import features_of, take_own_ends
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.dflash.config import NAME, read_settings, tapped_layers
from mlx_speculation.models.dflash.head import DFlashHead
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.token_ids import logit_width


class LoadedDFlash(NamedTuple):
    """A drafter, and the layers of the target whose outputs it reads."""

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
    features = features_of(weights, NAME, parts.dim)
    layers = tapped_layers(config, len(parts.layers), features)
    vocab, dim = logit_width(model), settings.layers.hidden_size
    ends = take_own_ends(weights, NAME, dim=dim, target_dim=parts.dim, vocab=vocab)
    rows = ends.embedding or vocab
    if settings.mask_token >= rows:
        raise ModelFolderError(
            f"config.json of the {NAME} says mask_token_id {settings.mask_token}, and "
            f"there are {rows} embeddings. Choose the drafter of this target."
        )
    head = DFlashHead(settings, len(layers) * parts.dim, ends)
    load_into(head, weights, NAME)
    return LoadedDFlash(head, layers)


def _check_files(folder: Path) -> None:
    extra = next(iter(folder.glob("mask_embedding*")), None)
    if extra is not None:
        raise ModelFolderError(
            f"The folder of the {NAME} has {extra.name}: its mask is no token, which "
            "is not known here. Choose another drafter."
        )
