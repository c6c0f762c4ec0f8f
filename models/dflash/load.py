"""Loading a drafter of blocks: a folder in, a module out."""

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
    notice: str = ""  # what is to be said of them; "": nothing


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """Options of the reading of a drafter of blocks.

    Attributes:
        layer_ids: what the list of layers counts; by its key when omitted.
        anchor: what row j of a block is for; as config.json says when omitted.
        starts: token ids of a few texts, by which the target tells what config.json
            leaves open; the usual reading is taken when omitted.
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
        folder: the drafter's, with config.json and safetensors.
        model: its target.
        layer_ids: see `ReadingOptions`.
        anchor: likewise.
        starts: likewise.

    Returns:
        The drafter; on a Linux CPU in float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: it is no such drafter, not complete, or not of this target.
        ConventionError: it guesses no better than by chance, in any reading.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    weights = read_blocks(folder, NAME)
    check_kind(weights, "dflash")
    settings = read_settings(config)
    options = ReadingOptions(layer_ids, anchor, starts)
    return build(config, weights, model, settings, DFlashHead, options, name=NAME)


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
    return renamed(read_tensors(folder, name), _OTHER_NAMES)


def renamed(weights: Weights, begins: Mapping[str, str]) -> Weights:
    """Return tensors whose names begin as usual, by what other files call that."""
    result: Weights = {}
    for key, value in weights.items():
        for theirs, ours in begins.items():
            if key.startswith(theirs):
                key = ours + key.removeprefix(theirs)
        result[key] = value
    return result


def build(
    config: Config,  # what config.json holds
    weights: Weights,  # all tensors
    model: nn.Module,  # the target
    settings: DFlashSettings,  # what config.json says
    # Makes the module, of settings, the numbers that it reads, and its own ends
    make: Callable[[DFlashSettings, int, OwnEnds], DFlashHead],
    options: ReadingOptions,
    *,
    name: str,  # of the drafter, for messages
    on_target: OnTarget = DFlash,  # puts it on the target
) -> LoadedDFlash:
    """Return a drafter of blocks with these tensors.

    Raises:
        ModelFolderError: they are not complete, or not of this target.
        ConventionError: it was to be probed, and guesses no better than by chance.
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
    """Return a drafter in the reading in which it guesses best, if several are open."""
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
    """Return weights whose norms multiply with what is stored and one."""
    return {
        name: (value + 1).astype(value.dtype)
        if value.ndim == 1 and "norm" in name
        else value
        for name, value in weights.items()
    }
