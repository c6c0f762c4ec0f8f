"""Loading a block drafter from its folder into a module."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    Weights,
    load_into,
    read_tensors,
    renamed,
)
from mlx_speculation.models.checkpoints.joined_head import (
    Loaded,
    OwnEnds,
    features_of,
    take_own_ends,
)
from mlx_speculation.models.checkpoints.layer_readings import LayerIds
from mlx_speculation.models.checkpoints.tensor_kind import check_kind
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.dflash.attention import SINKS
from mlx_speculation.models.dflash.config import (
    NAME,
    Anchor,
    DFlashSettings,
    layer_readings,
    open_readings,
    read_settings,
)
from mlx_speculation.models.dflash.head import DFlash, DFlashHead
from mlx_speculation.models.dflash.probe import OnTarget, probe_blocks
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.token_ids import logit_width

# Prefixes of names in some files, and ours.
_OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}


def load_dflash(
    folder: str | Path,
    model: nn.Module,
    *,
    layer_ids: LayerIds | None = None,
    anchor: Anchor | None = None,
    starts: Sequence[Sequence[int]] | None = None,
) -> Loaded:
    """Load the DFlash drafter of a target from a folder of its own.

    `layer_ids` says how the list of layers in config.json counts, see
    `checkpoints.layer_readings`; None: as lists under its key usually do. `anchor` says
    which position row j of a block predicts; None: as config.json says, or the usual
    one. `starts` are token ids of a few texts for a probe, which decides what
    config.json leaves open; None: no probe, and the usual reading. On a Linux CPU the
    drafter is float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: the drafter is of another kind or target, or not complete.
        ConventionError: the drafter scores no better than chance, however its layer ids
            and its anchor are read.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    weights = read_blocks(folder, NAME)
    check_kind(weights, "dflash")
    return build(
        config,
        weights,
        model,
        read_settings(config),
        DFlashHead,
        name=NAME,
        layer_ids=layer_ids,
        anchor=anchor,
        starts=starts,
    )


def read_blocks(folder: Path, name: str) -> Weights:
    """Return the tensors of a block drafter, by the usual names.

    Raises:
        ModelFolderError: there are no tensors, or the mask has a file of its own.
    """
    extra = next(iter(folder.glob("mask_embedding*")), None)
    if extra is not None:
        raise ModelFolderError(
            f"The folder of the {name} has {extra.name}: a mask that is not a token "
            "is not supported. Choose another drafter."
        )
    return renamed(read_tensors(folder, name), _OTHER_NAMES)


def build(
    config: Config,
    weights: Weights,
    model: nn.Module,
    settings: DFlashSettings,
    # Makes the module from settings, `width` and `ends`, see `DFlashHead`
    make: Callable[[DFlashSettings, int, OwnEnds], DFlashHead],
    *,
    name: str,  # the drafter's name, for messages
    on_target: OnTarget = DFlash,
    layer_ids: LayerIds | None,
    anchor: Anchor | None,
    starts: Sequence[Sequence[int]] | None,
) -> Loaded:
    """Return a block drafter with these tensors; see `load_dflash`.

    Raises:
        ModelFolderError: the tensors are not complete, or not of this target.
        ConventionError: there was a probe, and no candidate scored better than chance.
    """
    parts = find_parts(model)
    parts.require("layers", "norm")
    features = features_of(weights, config, name, parts.dim)
    readings = layer_readings(
        config, len(parts.layers), features, name=name, counts=layer_ids
    )
    layers = readings.usual
    vocab, dim = logit_width(model), settings.layers.hidden_size
    ends = take_own_ends(weights, name, dim=dim, target_dim=parts.dim, vocab=vocab)
    rows = ends.embedding or vocab
    if settings.mask_token >= rows:
        raise ModelFolderError(
            f"config.json of the {name} has mask_token_id {settings.mask_token}, but "
            f"there are only {rows} embeddings. Choose the drafter of this target."
        )
    if anchor is not None:
        settings = replace(settings, anchor=anchor)
    head = make(settings, len(layers) * parts.dim, ends)
    for index, layer in enumerate(head.layers):
        if f"layers.{index}.self_attn.{SINKS}" in weights:
            layer.self_attn[SINKS] = mx.zeros(layer.self_attn.n_heads)
    load_into(head, _with_ones(weights) if settings.plus_one else weights, name)
    score, other = None, open_readings(config)[1] and anchor is None
    if starts is not None and (other or readings.guessed or len(readings.layers) > 1):
        layers, score = probe_blocks(
            head, on_target, model, readings, starts, other_anchor=other
        )
    return Loaded(head, layers, readings.notice(layers, score))


def _with_ones(weights: Weights) -> Weights:
    """Return the weights, with 1 added to the weights of norms."""
    return {
        name: (value + 1).astype(value.dtype)
        if value.ndim == 1 and "norm" in name
        else value
        for name, value in weights.items()
    }
