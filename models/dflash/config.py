"""What the config.json of a DFlash drafter says.

`target_layer_ids` counts the target's layers from 0, by what they return; the last
layer stands for what the final norm returns. `aux_hidden_state_layer_ids` of
speculators is one more. Without either, L layers are spread over the target's N:
round(1 + i * (N - 4) / (L - 1)).
"""

from dataclasses import dataclass
from typing import Any

from mlx_lm.models import qwen3

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    layer_args,
    number,
    whole_numbers,
)
from mlx_speculation.models.checkpoints.joined_head import check_layers

NAME = "DFlash drafter"
_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class DFlashSettings:
    """A DFlash drafter's config.json."""

    layers: qwen3.ModelArgs  # the arguments of its decoder layers, as mlx-lm takes them
    block: int  # the tokens of a block, the known one in front included
    mask_token: int  # the id that stands for tokens that are to be drafted
    # For each layer how many positions it sees; None: all
    windows: tuple[int | None, ...]
    causal: bool  # whether a layer with a window sees no later positions of the block


def is_dflash(config: Config) -> bool:
    """Return whether a config.json is that of a DFlash drafter."""
    return (
        "dflash_config" in config
        or "dflash" in str(config.get("architectures")).lower()
        or config.get("speculators_model_type") == "dflash"
    )


def read_settings(config: Config) -> DFlashSettings:
    """Read config.json.

    Raises:
        ModelFolderError: something is missing, or not known.
    """
    part = config.get("transformer_layer_config")
    text = part if isinstance(part, dict) else config
    layers = layer_args(text, NAME, qwen3.ModelArgs)
    own = _own(config)
    kind = own.get("projector_type")
    if kind not in (None, "dflash") or own.get("markov_rank") is not None:
        raise ModelFolderError(
            f"config.json of the {NAME} says projector_type {kind!r} and markov_rank "
            f"{own.get('markov_rank')!r}: it is of a kind (DSpark) that is not known "
            "here. Choose another drafter."
        )
    mask = own.get("mask_token_id")
    if not isinstance(mask, int) or isinstance(mask, bool) or mask < 0:
        raise ModelFolderError(
            f"config.json of the {NAME} says mask_token_id {mask!r}, and a token id is "
            "needed. Take a whole checkpoint."
        )
    block = number(own, "block_size", NAME)
    if block < 2:
        raise ModelFolderError(
            f"config.json of the {NAME} says block_size {block}, and at least 2 are "
            "needed: the known token and one draft."
        )
    return DFlashSettings(
        layers=layers,
        block=block,
        mask_token=mask,
        windows=_windows(own, layers.num_hidden_layers),
        causal=own.get("causal") is not False,
    )


def tapped_layers(config: Config, trunk: int, features: int | None) -> tuple[int, ...]:
    """Return the layers of the target whose output is read, from 0, in order.

    Args:
        config: what config.json holds.
        trunk: how many layers the target has.
        features: how many layers the projection takes; None: not known.

    Raises:
        ModelFolderError: the target has no such layer, or none are named or known.
    """
    own = _own(config)
    stated = own.get("num_target_layers")
    if stated not in (None, trunk):
        raise ModelFolderError(
            f"config.json of the {NAME} says num_target_layers {stated}, and this "
            f"target has {trunk}. Choose the drafter of this target."
        )
    ids: Any = own.get("target_layer_ids")
    if ids is None and own.get("aux_hidden_state_layer_ids") is not None:
        ids = [each - 1 for each in own["aux_hidden_state_layer_ids"]]
    if ids is None:
        if features is None or features < 2:
            raise ModelFolderError(
                f"config.json of the {NAME} names no target_layer_ids, and the usual "
                f"ones are known for 2 layers or more, not for {features}. Name them."
            )
        steps = range(features)
        ids = [round(1 + i * (trunk - 4) / (features - 1)) for i in steps]
    ids = whole_numbers(ids, "target_layer_ids", NAME)
    return check_layers(ids, NAME, trunk=trunk, features=features)


def _own(config: Config) -> Config:
    """Return all keys of config.json, those of dflash_config before the others."""
    part = config.get("dflash_config")
    return config | part if isinstance(part, dict) else config


def _windows(own: Config, layers: int) -> tuple[int | None, ...]:
    swa = own.get("use_swa")
    usual = _KINDS[1] if swa else _KINDS[0]
    kinds = own.get("layer_types") or [usual] * layers
    sliding = _KINDS[1] in kinds
    if len(kinds) != layers or not set(kinds) <= set(_KINDS):
        raise ModelFolderError(
            f"config.json of the {NAME} says layer_types {kinds!r}, and {layers} of "
            f"{' and '.join(_KINDS)} are needed."
        )
    if swa is not None and bool(swa) != sliding:
        raise ModelFolderError(
            f"config.json of the {NAME} says use_swa {swa!r} and layer_types {kinds}, "
            "which contradict each other. Take out the one that is wrong."
        )
    if not sliding:
        return (None,) * layers
    key = "swa_window_size" if own.get("swa_window_size") else "sliding_window"
    window = number(own, key, NAME)
    return tuple(window if kind == _KINDS[1] else None for kind in kinds)
