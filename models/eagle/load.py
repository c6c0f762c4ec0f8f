"""Loading an EAGLE-3 or P-EAGLE head from its folder into a module.

The names and shapes of the tensors decide whether the head has an embedding and an
output layer of its own, norms before `fc` and biases, and whether it is packed. The
rest is read from config.json.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

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
from mlx_speculation.models.checkpoints.layer_readings import LayerIds
from mlx_speculation.models.checkpoints.tensor_kind import check_kind
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
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.token_ids import logit_width

# Prefixes of names in some files, and ours.
_OTHER_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}

# Another name in some files for the first norm of a later layer.
_LATER_NAMES = {"hidden_norm.weight": "input_layernorm.weight"}
PARALLEL_NAME = "P-EAGLE head"


class LoadedEagle(NamedTuple):
    """A head, and the layers of the target whose outputs it reads."""

    head: EagleHead
    layers: tuple[int, ...]


class LoadedPEagle(NamedTuple):
    """A P-EAGLE head, and the layers of the target whose outputs it reads."""

    head: PEagleHead
    layers: tuple[int, ...]


def load_eagle_head(
    folder: str | Path, model: nn.Module, *, layer_ids: LayerIds | None = None
) -> LoadedEagle:
    """Load the EAGLE-3 head in a folder of its own.

    Args:
        folder: the head's folder, with config.json and safetensors.
        model: its target.
        layer_ids: how the list of layers in config.json counts, see
            `checkpoints.layer_readings`; None: as is usual at the list's place.

    Returns:
        The head; on a Linux CPU in float32, dequantized where it was quantized.

    Raises:
        ModelFolderError: the head is of another kind or target, or not complete.
    """
    config, weights = _read(Path(folder).expanduser(), "eagle")
    plan = _planned(config, weights, model, layer_ids)
    head = EagleHead(plan.settings, plan.features, plan.ends, plan.norms)
    load_into(head, weights, NAME, _file_name)
    return LoadedEagle(head, plan.layers)


def load_peagle_head(
    folder: str | Path, model: nn.Module, *, layer_ids: LayerIds | None = None
) -> LoadedPEagle:
    """Load the P-EAGLE head in a folder of its own; see `load_eagle_head`.

    Raises:
        ModelFolderError: the head is of another kind or target, or not complete.
    """
    config, weights = _read(Path(folder).expanduser(), "peagle")
    plan = _planned(config, weights, model, layer_ids)
    _check_mask(plan, weights, model)
    head = PEagleHead(plan.settings, plan.features, plan.ends, plan.norms)
    load_into(head, weights, PARALLEL_NAME, _file_name)
    return LoadedPEagle(head, plan.layers)


class _Plan(NamedTuple):
    """Parts of a head."""

    settings: EagleSettings
    features: int  # how many layers of the target it reads
    layers: tuple[int, ...]  # these layers
    ends: OwnEnds
    norms: frozenset[str]


def _read(folder: Path, kind: str) -> tuple[Config, Weights]:
    config = read_config(folder)
    weights = read_tensors(folder, NAME)
    check_kind(weights, kind)
    return config, _renamed(weights)


def _planned(
    config: Config, weights: Weights, model: nn.Module, layer_ids: LayerIds | None
) -> _Plan:
    """Return the parts of the head; d2t and t2d are removed from the weights."""
    settings = _by_tensors(read_settings(config), weights)
    parts = find_parts(model)
    parts.require("layers")
    if settings.target_dim != parts.dim:
        _refuse(
            "target_hidden_size", settings.target_dim, f"this target has {parts.dim}"
        )
    vocab, dim = logit_width(model), settings.layer.hidden_size
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
        _refuse("draft_vocab_size", settings.draft_vocab, f"it has {columns} columns")
    norms = _norms(weights)
    if settings.norm_before_fc and not norms:
        _refuse("norm_before_fc", True, "there is neither input_norm nor fc_norm")
    features = features_of(weights, config, NAME, parts.dim)
    if not settings.projected:
        features = (1,)
        if dim != parts.dim:
            _refuse("hidden_size", dim, f"there is no fc from the target's {parts.dim}")
    trunk = len(parts.layers)
    layers = layer_readings(config, trunk, features, layer_ids).usual
    return _Plan(settings, len(layers), layers, ends, norms)


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


def _check_mask(plan: _Plan, weights: Weights, model: nn.Module) -> None:
    """Refuse a mask that does not fit, and make `mask_hidden` one vector."""
    mask, state = plan.settings.mask, weights.get("mask_hidden")
    width = plan.features * plan.settings.target_dim
    if mask is None:
        _refuse("no mask_token_id or ptd_token_id", "", "masks need a token")
    rows = plan.ends.embedding or logit_width(model)
    if mask.token >= rows:
        _refuse("mask_token_id", mask.token, f"there are {rows} embeddings")
    if state is None or state.size != width:
        raise ModelFolderError(
            f"mask_hidden of the {PARALLEL_NAME} has "
            f"{0 if state is None else state.size} numbers, and fc takes {width}. Take "
            "a whole checkpoint."
        )
    weights["mask_hidden"] = state.reshape(width)


def _renamed(weights: Weights) -> Weights:
    result: Weights = {}
    for name, value in weights.items():
        for theirs, ours in _OTHER_NAMES.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        layer, _, rest = name.removeprefix("layers.").partition(".")
        if name.startswith("layers.") and layer.isdigit():
            rest = _LATER_NAMES.get(rest, rest)
            name = f"later.{int(layer) - 1}.{rest}"
        result[name] = value
    return result


def _file_name(name: str) -> str:
    """Return the name that a parameter usually has in files."""
    if not name.startswith("later."):
        return name
    _, layer, rest = name.split(".", 2)
    return f"layers.{int(layer) + 1}.{rest}"


def _norms(weights: Weights) -> frozenset[str]:
    kinds = {"fc_norm": "each", "input_norm": "joined"}
    result = {name.split(".")[0] for name in weights}
    return frozenset(kind for name, kind in kinds.items() if name in result)


def _refuse(key: str, value: Any, instead: str) -> NoReturn:
    raise ModelFolderError(
        f"config.json of the {NAME} says {key} {value}, and {instead}. Take a whole "
        f"checkpoint of this target's {NAME}."
    )
