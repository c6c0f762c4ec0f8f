"""Loading a drafter of blocks: a folder in, a module out."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    Weights,
    load_into,
    read_tensors,
)
from mlx_speculation.models.checkpoints.joined_head import (
    OwnEnds,
    features_of,
    take_own_ends,
)
from mlx_speculation.models.checkpoints.told_by_tensors import check_kind
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.dflash.attention import SINKS
from mlx_speculation.models.dflash.config import (
    NAME,
    DFlashSettings,
    LayerIds,
    read_settings,
    tapped_layers,
)
from mlx_speculation.models.dflash.head import DFlashHead
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.token_ids import logit_width

# What some files call the parts, at the beginning of a name.
_OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}


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
    weights = read_blocks(folder, NAME)
    check_kind(weights, "dflash")
    settings = read_settings(config)
    return build(config, weights, model, settings, DFlashHead, name=NAME)


def read_blocks(folder: Path, name: str) -> Weights:
    """Return the tensors of a drafter of blocks, under the usual names.

    Raises:
        ModelFolderError: there are none, or its mask is no token.
    """
    extra = next(iter(folder.glob("mask_embedding*")), None)
    if extra is not None:
        raise ModelFolderError(
            f"The folder of the {name} has {extra.name}: its mask is no token, which "
            "is not known here. Choose another drafter."
        )
    found: Weights = {}
    for own, value in read_tensors(folder, name).items():
        for theirs, ours in _OTHER_NAMES.items():
            if own.startswith(theirs):
                own = ours + own.removeprefix(theirs)
        found[own] = value
    return found


def build(
    config: Config,  # what config.json holds
    weights: Weights,  # all tensors
    model: nn.Module,  # the target
    settings: DFlashSettings,  # what config.json says
    # Makes the module, of settings, the numbers that it reads, and its own ends
    make: Callable[[DFlashSettings, int, OwnEnds], DFlashHead],
    *,
    name: str,  # of the drafter, for messages
    layer_ids: LayerIds | None = None,  # what the list of layers counts
) -> LoadedDFlash:
    """Return a drafter of blocks with these tensors.

    Raises:
        ModelFolderError: they are not complete, or not of this target.
    """
    parts = find_parts(model)
    parts.require("layers", "norm")
    features = features_of(weights, name, parts.dim)
    trunk = len(parts.layers)
    layers = tapped_layers(config, trunk, features, name=name, reading=layer_ids)
    vocab, dim = logit_width(model), settings.layers.hidden_size
    ends = take_own_ends(weights, name, dim=dim, target_dim=parts.dim, vocab=vocab)
    rows = ends.embedding or vocab
    if settings.mask_token >= rows:
        raise ModelFolderError(
            f"config.json of the {name} says mask_token_id {settings.mask_token}, and "
            f"there are {rows} embeddings. Choose the drafter of this target."
        )
    head = make(settings, len(layers) * parts.dim, ends)
    for index, layer in enumerate(head.layers):
        if f"layers.{index}.self_attn.{SINKS}" in weights:
            layer.self_attn[SINKS] = mx.zeros(layer.self_attn.n_heads)
    load_into(head, _with_ones(weights) if settings.plus_one else weights, name)
    return LoadedDFlash(head, layers)


def _with_ones(weights: Weights) -> Weights:
    """Return weights whose norms multiply with what is stored and one."""
    return {
        name: (value + 1).astype(value.dtype)
        if value.ndim == 1 and "norm" in name
        else value
        for name, value in weights.items()
    }
