"""Loading an EAGLE-3 head: a folder in, a module out.

What the tensors show is taken from them: its own embedding and output layer, norms
before `fc`, biases, packing. What they do not show is in config.json.
"""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Weights,
    load_into,
    read_tensors,
)
from mlx_speculation.models.checkpoints.joined_head import (
    check_layers,
    features_of,
    take_own_ends,
)
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.eagle.config import (
    NAME,
    LayerIds,
    read_settings,
    target_layers,
)
from mlx_speculation.models.eagle.head import EagleHead
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.token_ids import logit_width

# What some files call the parts, at the beginning of a name.
_OTHER_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


class LoadedEagle(NamedTuple):
    """A head, and the layers of the target whose outputs it reads."""

    head: EagleHead
    layers: tuple[int, ...]


def load_eagle_head(
    folder: str | Path, model: nn.Module, *, layer_ids: LayerIds | None = None
) -> LoadedEagle:
    """Load the EAGLE-3 head in a folder of its own.

    Args:
        folder: the head's, with config.json and safetensors.
        model: its target.
        layer_ids: how the list of layers in config.json is meant, see
            `config`; by its place when omitted.

    Returns:
        The head; on a Linux CPU in float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: it is no such head, not complete, or not of this target.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    settings = read_settings(config)
    parts = find_parts(model)
    parts.require("layers")
    layers = target_layers(config, len(parts.layers), layer_ids)
    weights = _renamed(read_tensors(folder, NAME))
    if settings.target_dim != parts.dim:
        _refuse(
            "target_hidden_size", settings.target_dim, f"this target has {parts.dim}"
        )
    vocab, dim = logit_width(model), settings.layer.hidden_size
    ends = take_own_ends(weights, NAME, dim=dim, target_dim=parts.dim, vocab=vocab)
    columns = ends.output or vocab
    if settings.draft_vocab not in (None, columns):
        _refuse("draft_vocab_size", settings.draft_vocab, f"it has {columns} columns")
    norms = _norms(weights)
    if settings.norm_before_fc and not norms:
        _refuse("norm_before_fc", True, "there is neither input_norm nor fc_norm")
    features = features_of(weights, NAME, parts.dim)
    check_layers(layers, NAME, trunk=len(parts.layers), features=features)
    head = EagleHead(settings, len(layers), ends, norms)
    load_into(head, weights, NAME)
    return LoadedEagle(head, layers)


def _renamed(weights: Weights) -> Weights:
    found: Weights = {}
    for name, value in weights.items():
        for theirs, ours in _OTHER_NAMES.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        found[name] = value
    if "mask_hidden" in found:
        raise ModelFolderError(
            f"The {NAME} has a mask_hidden: it drafts all tokens at once (P-EAGLE), "
            "which is not known here. Choose a head that drafts in a chain."
        )
    return found


def _norms(weights: Weights) -> frozenset[str]:
    kinds = {"fc_norm": "each", "input_norm": "joined"}
    found = {name.split(".")[0] for name in weights}
    return frozenset(kind for name, kind in kinds.items() if name in found)


def _refuse(key: str, value: Any, instead: str) -> None:
    raise ModelFolderError(
        f"config.json of the {NAME} says {key} {value}, and {instead}. Take a whole "
        f"checkpoint of this target's {NAME}."
    )
