"""Loading a block drafter from its folder into a module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from mlx_speculation.models.checkpoints.layer_readings import LayerIds, LayerReadings
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


class LoadedDFlash(NamedTuple):
    """A drafter, and the layers of the target whose outputs it reads."""

    head: DFlashHead
    layers: tuple[int, ...]
    notice: str = ""  # a notice to the user about the layers; "": none is needed


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """Options for the parts of config.json that can be read in several ways.

    Attributes:
        layer_ids: how the list of layers counts; as usual for its key when omitted.
        anchor: the position that row j of a block predicts; that of config.json when
            omitted.
        starts: token ids of a few texts for a probe, which decides what config.json
            leaves open; None: no probe, the usual reading is taken.
    """

    layer_ids: LayerIds | None = None
    anchor: Anchor | None = None
    starts: Sequence[Sequence[int]] | None = None


def load_dflash(
    folder: str | Path,
    model: nn.Module,
    *,
    layer_ids: LayerIds | None = None,
    anchor: Anchor | None = None,
    starts: Sequence[Sequence[int]] | None = None,
) -> LoadedDFlash:
    """Load the DFlash drafter in a folder of its own.

    Args:
        folder: the drafter's folder, with config.json and safetensors.
        model: its target.
        layer_ids: see `ReadingOptions`.
        anchor: see `ReadingOptions`.
        starts: see `ReadingOptions`.

    Returns:
        The drafter; on a Linux CPU in float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: the drafter is of another kind or target, or not complete.
        ConventionError: no reading scores better than chance.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    weights = read_blocks(folder, NAME)
    check_kind(weights, "dflash")
    settings = read_settings(config)
    options = ReadingOptions(layer_ids, anchor, starts)
    return build(config, weights, model, settings, DFlashHead, options, name=NAME)


def read_blocks(folder: Path, name: str) -> Weights:
    """Return the tensors of a block drafter, by the usual names.

    Raises:
        ModelFolderError: there are no tensors, or the mask is no token.
    """
    extra = next(iter(folder.glob("mask_embedding*")), None)
    if extra is not None:
        raise ModelFolderError(
            f"The folder of the {name} has {extra.name}: its mask is no token, which "
            "is not known here. Choose another drafter."
        )
    return renamed(read_tensors(folder, name), _OTHER_NAMES)


def renamed(weights: Weights, begins: Mapping[str, str]) -> Weights:
    """Return the tensors, with prefixes of their names replaced as `begins` says."""
    result: Weights = {}
    for key, value in weights.items():
        for theirs, ours in begins.items():
            if key.startswith(theirs):
                key = ours + key.removeprefix(theirs)
        result[key] = value
    return result


def build(
    config: Config,  # the content of config.json
    weights: Weights,  # all tensors
    model: nn.Module,  # the target
    settings: DFlashSettings,  # the settings of config.json
    # Makes the module from settings, `width` and `ends`, see `DFlashHead`
    make: Callable[[DFlashSettings, int, OwnEnds], DFlashHead],
    options: ReadingOptions,
    *,
    name: str,  # the drafter's name, for messages
    on_target: OnTarget = DFlash,  # puts it on the target
) -> LoadedDFlash:
    """Return a block drafter with these tensors.

    Raises:
        ModelFolderError: the tensors are not complete, or not of this target.
        ConventionError: there was a probe, and no reading scored better than chance.
    """
    parts = find_parts(model)
    parts.require("layers", "norm")
    features = features_of(weights, config, name, parts.dim)
    readings = layer_readings(
        config, len(parts.layers), features, name=name, counts=options.layer_ids
    )
    layers = readings.usual
    vocab, dim = logit_width(model), settings.layers.hidden_size
    ends = take_own_ends(weights, name, dim=dim, target_dim=parts.dim, vocab=vocab)
    rows = ends.embedding or vocab
    if settings.mask_token >= rows:
        raise ModelFolderError(
            f"config.json of the {name} says mask_token_id {settings.mask_token}, and "
            f"there are {rows} embeddings. Choose the drafter of this target."
        )
    if options.anchor is not None:
        settings = replace(settings, anchor=options.anchor)
    head = make(settings, len(layers) * parts.dim, ends)
    for index, layer in enumerate(head.layers):
        if f"layers.{index}.self_attn.{SINKS}" in weights:
            layer.self_attn[SINKS] = mx.zeros(layer.self_attn.n_heads)
    load_into(head, _with_ones(weights) if settings.plus_one else weights, name)
    return _read(head, config, model, readings, options, on_target)


def _read(
    head: DFlashHead,
    config: Config,
    model: nn.Module,
    readings: LayerReadings,
    options: ReadingOptions,
    on_target: OnTarget,
) -> LoadedDFlash:
    """Return a drafter in the reading that a probe chooses, or in the usual one."""
    usual, score = readings.usual, None
    other_anchor = open_readings(config)[1] and options.anchor is None
    doubtful = other_anchor or readings.guessed or len(readings.layers) > 1
    if options.starts is None or not doubtful:
        return LoadedDFlash(head, usual, readings.notice(usual, score))
    best, score = probe_blocks(
        head, on_target, model, readings, options.starts, other_anchor=other_anchor
    )
    head.settings = replace(head.settings, anchor=best.anchor)
    return LoadedDFlash(head, best.layers, readings.notice(best.layers, score))


def _with_ones(weights: Weights) -> Weights:
    """Return the weights with one added to those of norms."""
    return {
        name: (value + 1).astype(value.dtype)
        if value.ndim == 1 and "norm" in name
        else value
        for name, value in weights.items()
    }
