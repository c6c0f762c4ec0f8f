"""What the config.json of an EAGLE-3 head says.

Four dialects are read: SGLang's and SpecForge's, vLLM's, the authors' and that of
speculators, which keeps the layer's own sizes in a part. Which layers of the target
the head reads is said in two ways, and a number means another layer in each:

    "tuple"    h[0] is the embedding and h[i] the output of layer i - 1. So where the
               list is at the top, and in the default, (2, N // 2, N - 3)
    "layers"   i is the output of layer i. So inside of eagle_config
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mlx_lm.models import llama

from mlx_speculation.errors import InvalidRequestError, ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    layer_args,
    number,
    whole_numbers,
)
from mlx_speculation.models.checkpoints.joined_head import check_layers
from mlx_speculation.models.config_json import nested

LayerIds = Literal["layers", "tuple"]
NAME = "EAGLE-3 head"
_LIST = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """An EAGLE-3 head's config.json."""

    layer: llama.ModelArgs  # the arguments of its decoder layer, as mlx-lm takes them
    target_dim: int  # the hidden size of the target
    # How many ids it drafts from; None: config.json does not say
    draft_vocab: int | None
    norm_before_residual: bool  # whether the normed state is added to, not the state
    norm_before_fc: bool  # whether it says that the joined states are normed
    norm_output: bool  # whether the state after the norm is recycled


def is_eagle(config: Config) -> bool:
    """Return whether a config.json is that of an EAGLE-3 head."""
    names = str(config.get("architectures"))
    return (
        config.get("speculators_model_type") == "eagle3"
        or "eagle3" in names.lower()
        or "eagle_config" in config
        or ("LlamaForCausalLM" in names and "draft_vocab_size" in config)
    )


def read_settings(config: Config) -> EagleSettings:
    """Read config.json.

    Raises:
        ModelFolderError: something is missing, or not known.
    """
    part = config.get("transformer_layer_config")
    own = part if isinstance(part, dict) else config
    layer = layer_args(own, NAME, llama.ModelArgs)
    count = layer.num_hidden_layers
    if count != 1:
        raise ModelFolderError(
            f"config.json of the {NAME} says num_hidden_layers {count}, and "
            "heads of 1 layer are known. Choose another drafter."
        )
    if nested(config, "eagle_config", "use_aux_hidden_state") is False:
        raise ModelFolderError(
            f"config.json of the {NAME} says use_aux_hidden_state false, and heads "
            "that read several layers are known. Choose another drafter."
        )
    speculators = config.get("speculators_model_type") == "eagle3"
    vocab = config.get("draft_vocab_size")
    target = number(config, "target_hidden_size", NAME, layer.hidden_size)
    return EagleSettings(
        layer=layer,
        target_dim=target,
        draft_vocab=None if vocab is None else number(config, "draft_vocab_size", NAME),
        norm_before_residual=_flag(config, "norm_before_residual", speculators),
        norm_before_fc=_flag(config, "norm_before_fc", False),
        norm_output=_flag(config, "norm_output", False),
    )


def target_layers(
    config: Config, trunk: int, reading: LayerIds | None = None
) -> tuple[int, ...]:
    """Return the layers of the target whose output the head reads, from 0.

    Args:
        config: what config.json holds.
        trunk: how many layers the target has.
        reading: how numbers in the list are meant; by their place when omitted.

    Raises:
        ModelFolderError: the target has no such layer.
        InvalidRequestError: the reading is none.
    """
    if reading is not None and reading not in get_args(LayerIds):
        raise InvalidRequestError(
            f"layer_ids is {reading!r}, and one of {', '.join(get_args(LayerIds))} is "
            "needed."
        )
    ids, usual = _stated(config)
    if ids is None:
        ids, reading = [2, trunk // 2, trunk - 3], "tuple"
    shift = 1 if (reading or usual) == "tuple" else 0
    layers = {each - shift for each in whole_numbers(ids, _LIST, NAME)}
    advice = f", or say how the list {ids} is meant: layer_ids='layers' or 'tuple'"
    return check_layers(sorted(layers), NAME, trunk=trunk, advice=advice)


def layer_readings(config: Config, trunk: int) -> dict[LayerIds, tuple[int, ...]]:
    """Return the layers that each reading of the list names, the usual one first.

    One that names layers which the target lacks is left out, and so is the list's
    other reading where there is no list.

    Raises:
        ModelFolderError: the usual one does.
    """
    ids, usual = _stated(config)
    found: dict[LayerIds, tuple[int, ...]] = {usual: target_layers(config, trunk)}
    if ids is not None:
        other: LayerIds = "layers" if usual == "tuple" else "tuple"
        with suppress(ModelFolderError):
            found[other] = target_layers(config, trunk, other)
    return found


def _stated(config: Config) -> tuple[Any, LayerIds]:
    """Return the list of layers, if there is one, and what its place says it counts."""
    inside = nested(config, "eagle_config", _LIST)
    return (config.get(_LIST), "tuple") if inside is None else (inside, "layers")


def _flag(config: Config, key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        value = nested(config, "eagle_config", key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelFolderError(
            f"config.json of the {NAME} says {key} {value!r}, and true or false is "
            "needed."
        )
    return value
