"""Loading an EAGLE-3 or P-EAGLE head from its folder into a module.

The tensors decide whether the head has an embedding and an output layer of its own,
biases, and norms before `fc`, and whether it is quantized. config.json has the rest.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
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
from mlx_speculation.models.checkpoints.tensor_kind import NAMES, check_kind
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.eagle.config import (
    NAME,
    EagleSettings,
    QueryNorms,
    layer_readings,
    read_settings,
)
from mlx_speculation.models.eagle.head import EagleHead
from mlx_speculation.models.eagle.parallel import PEagleHead
from mlx_speculation.models.eagle.probe import probe_layers
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.introspect.parts import Parts
from mlx_speculation.models.token_ids import logit_width

# Prefixes of names in some files, and ours.
_OTHER_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def load_eagle_head(
    folder: str | Path,
    model: nn.Module,
    *,
    kind: Literal["eagle", "peagle"] = "eagle",
    layer_ids: LayerIds | None = None,
    starts: Sequence[Sequence[int]] | None = None,
) -> Loaded:
    """Load the EAGLE-3 or P-EAGLE head of a target from a folder of its own.

    `layer_ids` says how config.json counts layers: from 0, or with the embedding as 0.
    Without it, a probe on texts that begin with the token ids `starts` finds the
    layers. With neither, the head reads the usual layers. On a Linux CPU the head is
    float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: the head is of another kind or target, or not complete.
        ConventionError: the head is no better than chance, whatever layers it reads.
    """
    folder = Path(folder).expanduser()
    config, weights = read_config(folder), read_tensors(folder, NAME)
    check_kind(weights, kind)
    weights = _renamed(weights)
    settings = _by_tensors(read_settings(config), weights)
    parts = find_parts(model)
    parts.require("layers")
    ends, norms = _checked_ends(settings, weights, parts, logit_width(model))
    features = features_of(weights, config, NAME, parts.dim)
    if not settings.projected:
        features = (1,)
    readings = layer_readings(config, len(parts.layers), features, layer_ids)
    layers, score = readings.usual, None
    make = EagleHead
    if kind == "peagle":
        make = PEagleHead
        rows = ends.embedding or logit_width(model)
        _check_mask(settings, weights, len(layers) * settings.target_dim, rows)
    head = make(settings, len(layers), ends, norms)
    load_into(head, weights, NAMES[kind], _file_name)
    if layer_ids is None and starts is not None:
        scores = probe_layers(head, model, readings, starts)
        layers, score = next(iter(scores.items()))
    return Loaded(head, layers, readings.notice(layers, score))


def _checked_ends(
    settings: EagleSettings, weights: Weights, parts: Parts, vocab: int
) -> tuple[OwnEnds, frozenset[str]]:
    """Return the head's own embedding and output layer, and the norms before `fc`.

    Checks that they fit the target. Removes d2t and t2d from the weights, and adds a
    tied embedding as the output layer.
    """
    if settings.target_dim != parts.dim:
        _refuse(
            "target_hidden_size", settings.target_dim, f"this target has {parts.dim}"
        )
    dim = settings.layer.hidden_size
    embedding = weights.get("embed_tokens.weight")
    if settings.tied and embedding is not None and "lm_head.weight" not in weights:
        weights |= {
            name.replace("embed_tokens.", "lm_head."): value
            for name, value in weights.items()
            if name.startswith("embed_tokens.")
        }
    ends = take_own_ends(weights, NAME, dim=dim, target_dim=parts.dim, vocab=vocab)
    columns = ends.output or vocab
    if settings.draft_vocab not in (None, columns):
        _refuse(
            "draft_vocab_size",
            settings.draft_vocab,
            f"there are {columns} columns of logits",
        )
    kinds = {"fc_norm": "each", "input_norm": "joined"}
    present = {name.split(".")[0] for name in weights}
    norms = frozenset(kind for name, kind in kinds.items() if name in present)
    if settings.norm_before_fc and not norms:
        _refuse("norm_before_fc", True, "there is neither input_norm nor fc_norm")
    if not settings.projected and dim != parts.dim:
        _refuse("hidden_size", dim, f"the target has {parts.dim}, and there is no fc")
    return ends, norms


def _by_tensors(settings: EagleSettings, weights: Weights) -> EagleSettings:
    """Return settings with the fields that the tensors show."""
    norm, query_norms = weights.get("midlayer.self_attn.q_norm.weight"), None
    if norm is not None and settings.gemma is None:
        args = settings.layer
        size = args.head_dim or args.hidden_size // args.num_attention_heads
        query_norms = "each" if norm.size == size else "together"
    return replace(
        settings,
        projected="fc.weight" in weights,
        query_norms=cast("QueryNorms | None", query_norms),
    )


def _check_mask(
    settings: EagleSettings, weights: Weights, width: int, rows: int
) -> None:
    """Refuse a mask that does not fit, and make `mask_hidden` one vector."""
    mask, state = settings.mask, weights.get("mask_hidden")
    if mask is None:
        _refuse("no mask_token_id and no", "ptd_token_id", "masks need a token")
    if mask.token >= rows:
        _refuse("mask_token_id", mask.token, f"there are only {rows} embeddings")
    if state is None or state.size != width:
        raise ModelFolderError(
            f"mask_hidden of the {NAMES['peagle']} has "
            f"{0 if state is None else state.size} numbers, but fc has input size "
            f"{width}. Take a whole checkpoint."
        )
    weights["mask_hidden"] = state.reshape(width)


def _renamed(weights: Weights) -> Weights:
    result: Weights = {}
    for name, value in renamed(weights, _OTHER_NAMES).items():
        layer, _, rest = name.removeprefix("layers.").partition(".")
        if name.startswith("layers.") and layer.isdigit():
            if rest == "hidden_norm.weight":  # the name in some files
                rest = "input_layernorm.weight"
            name = f"later.{int(layer) - 1}.{rest}"
        result[name] = value
    return result


def _file_name(name: str) -> str:
    if not name.startswith("later."):
        return name
    _, layer, rest = name.split(".", 2)
    return f"layers.{int(layer) + 1}.{rest}"


def _refuse(key: str, value: Any, instead: str) -> NoReturn:
    raise ModelFolderError(
        f"config.json of the {NAME} has {key} {value}, but {instead}. Take a whole "
        f"checkpoint of this target's {NAME}."
    )
