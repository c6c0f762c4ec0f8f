"""Loading an EAGLE-3 head: a folder in, a module out.

What the tensors show is taken from them: its own embedding and output layer, norms
before `fc`, biases, packing. What they do not show is in config.json.
"""

from pathlib import Path
from typing import Any, NamedTuple

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
from mlx_speculation.models.eagle.config import (
    NAME,
    EagleSettings,
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
    """A head, and what it reads.

    Attributes:
        head: the head.
        layers: of the target, whose outputs it reads.
    """

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
    vocab = logit_width(model)
    ids = take_draft_ids(weights, vocab, NAME)
    _check(settings, weights, layers, parts.dim, ids, vocab)
    head = EagleHead(
        settings,
        len(layers),
        ids=ids,
        output=rows_of(weights, "lm_head"),
        embedding=rows_of(weights, "embed_tokens"),
        norms=_norms(weights),
        biases=biased(weights),
    )
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
    each = any(name.startswith("fc_norm.") for name in weights)
    joined = "input_norm.weight" in weights
    return frozenset(
        name for name, there in (("each", each), ("joined", joined)) if there
    )


def _check(
    settings: EagleSettings,
    weights: Weights,
    layers: tuple[int, ...],
    dim: int,
    ids: mx.array | None,
    vocab: int,
) -> None:
    """Refuse a head that is not of this target, or does not know its own ids."""
    if settings.target_dim != dim:
        _refuse("target_hidden_size", settings.target_dim, f"this target has {dim}")
    own = settings.sizes.dim
    for end, name in (("embed_tokens", "embedding"), ("lm_head", "output layer")):
        if f"{end}.weight" not in weights and own != dim:
            _refuse(
                "hidden_size", own, f"without an {name} of its own it has to be {dim}"
            )
    columns = rows_of(weights, "lm_head") or vocab
    if columns != (vocab if ids is None else ids.size):
        told = "no d2t" if ids is None else f"a d2t of {ids.size}"
        raise ModelFolderError(
            f"The {NAME} has {columns} columns of logits and {told}, and the target "
            f"{vocab} ids. Take a whole checkpoint of this target's head."
        )
    if settings.draft_vocab not in (None, columns):
        _refuse("draft_vocab_size", settings.draft_vocab, f"it has {columns} columns")
    wide = weights.get("fc.weight")
    if wide is not None and "fc.scales" not in weights:
        features = wide.shape[-1] / dim
        if features != len(layers):
            raise ModelFolderError(
                f"The {NAME} reads {features:g} layers of its target, and config.json "
                f"names {len(layers)}: {list(layers)}. Choose the head of this target."
            )
    if settings.norm_before_fc and not _norms(weights):
        raise ModelFolderError(
            f"config.json of the {NAME} says norm_before_fc, and there is neither "
            "input_norm nor fc_norm. Take a whole checkpoint."
        )


def _refuse(key: str, value: Any, instead: str) -> None:
    raise ModelFolderError(
        f"config.json of the {NAME} says {key} {value}, and {instead}. Choose the head "
        "of this target."
    )
