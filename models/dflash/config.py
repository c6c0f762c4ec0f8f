"""Configuration of block drafters, from config.json: DFlash and its descendants.

A drafter that reads the last layer of the target gets the output of the final norm
instead. Row 0 of a block is its anchor, the token before the drafted tokens. Two
readings of the rows are in use:

    given      row j predicts the token at its own position; row 0 predicts nothing
    samples    row j predicts the token after its position
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlx_lm.models import qwen3

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    layer_args,
    layer_part,
    layer_windows,
    number,
    proposed_tokens,
)
from mlx_speculation.models.checkpoints.layer_readings import (
    LayerIds,
    LayerReadings,
    read_layers,
    usual_of_blocks,
)
from mlx_speculation.models.checkpoints.rotation import (
    FULL,
    SLIDING,
    Rotation,
    rotations_of,
)

NAME = "DFlash drafter"
Anchor = Literal["given", "samples"]


@dataclass(frozen=True, slots=True)
class DFlashSettings:
    """The settings of a block drafter, from config.json."""

    layers: qwen3.ModelArgs  # of all layers, with the rotation of layer 0
    block: int  # the number of rows of a block, with the anchor
    mask_token: int
    windows: tuple[int | None, ...]  # of each layer; None: unlimited
    causal: tuple[bool, ...]  # of each layer: whether rows see no later rows of a block
    rotations: tuple[Rotation, ...]  # of each layer
    anchor: Anchor = "given"
    partial: bool = False  # whether only a share of a head's dimensions is rotated
    pairs: bool = False  # whether rotation pairs neighbouring dimensions, not halves
    value_scale: float = 1.0
    gated: bool = False  # whether queries come with gates for the attention's output
    plus_one: bool = False  # whether norm weights are stored minus one

    @property
    def depth(self) -> int:
        """The largest number of tokens that a block drafts."""
        return self.block if self.anchor == "samples" else self.block - 1


def is_dflash(config: Config) -> bool:
    """Return whether a config.json is that of DFlash, or of a later block drafter."""
    names = str(config.get("architectures")).lower()
    return (
        "dflash_config" in config
        or "dflash" in names
        or "museglimmerassistant" in names
        or config.get("speculators_model_type") == "dflash"
    )


def read_settings(config: Config) -> DFlashSettings:
    """Read config.json.

    Raises:
        ModelFolderError: a value is missing or not supported.
    """
    fields = own_keys(config)
    kind = fields.get("projector_type")
    if kind not in (None, "dflash") or fields.get("markov_rank"):
        raise ModelFolderError(
            f"config.json of the {NAME} has projector_type {kind!r} and markov_rank "
            f"{fields.get('markov_rank')!r}, but the tensors beside it are those of a "
            f"{NAME}. Take config.json and tensors of one checkpoint, or choose "
            "another drafter."
        )
    gemma = (
        "gemma4" in f"{config.get('architectures')} {fields.get('model_type')}".lower()
    )
    return block_settings(config, NAME, mask_token=4 if gemma else None)


def block_settings(
    config: Config,
    name: str,
    *,
    mask_token: int | None = None,  # the default; None: config.json has to name it
    anchor: Anchor = "given",  # the default
    causal: bool = True,  # the default of sliding layers
    gemma: bool = False,  # whether the layers have Gemma's activation
    # Whether layer_types can be a wrong copy from the target's config.json
    copied: bool = False,
) -> DFlashSettings:
    """Read the settings that all block drafters have.

    Raises:
        ModelFolderError: a value is missing or not supported.
    """
    text = layer_part(config)
    fields = own_keys(config)
    anchor = stated_anchor(config) or anchor
    block = _block_size(fields, anchor, name)
    keys = text | fields
    if (
        copied
        and fields.get("use_swa")
        and SLIDING not in (keys.get("layer_types") or ())
    ):
        keys = keys | {"layer_types": None}
    windows = _windows(keys, fields, number(text, "num_hidden_layers", name, 1), name)
    rotations = rotations_of(config, name, windows)
    layers = layer_args(text, name, qwen3.ModelArgs, rotations=rotations, gemma=gemma)
    of_qwen3_5 = str(text.get("model_type")).startswith("qwen3_5")
    neox = fields.get("rope_is_neox_style", fields.get("is_neox_style"))
    return DFlashSettings(
        layers=layers,
        block=block,
        mask_token=number(fields, "mask_token_id", name, mask_token, least=0),
        windows=windows,
        causal=tuple(_causal(config, window, causal) for window in windows),
        anchor=anchor,
        rotations=rotations,
        # Only drafters made of Qwen3.5's layers rotate a part of each head. Other files
        # copy `partial_rotary_factor` from the target, without effect.
        partial=of_qwen3_5,
        pairs=neox is False,
        value_scale=float(fields.get("attention_value_scale") or 1.0),
        gated=bool(fields.get("enable_qwen35_gated_q_proj")),
        plus_one=of_qwen3_5,
    )


def _block_size(fields: Config, anchor: Anchor, name: str) -> int:
    """Return the number of rows of a block, the anchor included."""
    block = number(fields, "block_size", name)
    if fields.get("dspark_bonus_anchor") and anchor == "samples":
        block -= 1  # the stated size includes the token after the block
    if block < (1 if anchor == "samples" else 2):
        raise ModelFolderError(
            f"config.json of the {name} has block_size {fields['block_size']}, which "
            "has to be at least 2, so that a block drafts a token."
        )
    return block


def own_keys(config: Config) -> Config:
    """Return all keys of config.json; those in dflash_config take precedence."""
    part = config.get("dflash_config")
    return config | part if isinstance(part, dict) else config


def stated_anchor(config: Config) -> Anchor | None:
    """Return the anchor that config.json states; None: it states none.

    Files of the library `speculators` state it by the number of drafted tokens.
    """
    fields = own_keys(config)
    said = fields.get("sample_from_anchor")
    if said is not None:
        return "samples" if said else "given"
    drafts, block = proposed_tokens(config), fields.get("block_size")
    if not isinstance(drafts, int) or not isinstance(block, int):
        return None
    return {block: "samples", block - 1: "given"}.get(drafts)  # type: ignore[return-value]


def layer_readings(
    config: Config,
    trunk: int,
    features: Sequence[int] = (),
    *,
    name: str = NAME,
    counts: LayerIds | None = None,
) -> LayerReadings:
    """Return the candidate lists of target layers to read, the usual list first.

    Layers are counted from 0; -1 stands for the embeddings. The target has `trunk`
    layers. `features` has each possible number of layers that `fc` reads; empty:
    unknown. `counts` says how the list in config.json counts; None: as lists under its
    key usually do.

    Raises:
        ModelFolderError: the target lacks a listed layer; or there is no list, and
            there are no usual layers for the count that `fc` reads.
        InvalidRequestError: `counts` is no way of counting.
    """
    stated = own_keys(config).get("num_target_layers")
    if stated not in (None, trunk):
        raise ModelFolderError(
            f"config.json of the {name} has num_target_layers {stated}, but this "
            f"target has {trunk} layers. Choose the drafter of this target."
        )
    return read_layers(
        config,
        name,
        trunk=trunk,
        features=features,
        usual=usual_of_blocks,
        counts=counts,
        both=open_readings(config)[0],
    )


def open_readings(config: Config) -> tuple[bool, bool]:
    """Return whether config.json leaves open how its list counts layers.

    The second result says whether config.json leaves the anchor open. The library
    `speculators` reads the number n of a list as layer n - 1, other libraries as layer
    n. Libraries also differ in the anchor if `sample_from_anchor` is missing. A GGUF
    file does not say how its list counts.
    """
    fields = own_keys(config)
    speculators = config.get("speculators_model_type") is not None
    listed = fields.get("target_layer_ids") is None or "gguf_layers" in fields
    return (
        listed and (speculators or "gguf_layers" in fields),
        speculators and stated_anchor(config) is None,
    )


def _causal(config: Config, window: int | None, usual: bool) -> bool:
    """Return whether a layer's rows see no later rows of the block."""
    fields = own_keys(config)
    if fields.get("dflash_query_causal"):
        return True
    for said in (
        config.get("is_causal"),
        fields.get("is_causal"),
        fields.get("causal"),
    ):
        if said is not None:
            return bool(said)
    if window is None:
        return False
    apart = fields.get("sliding_window_non_causal")
    return usual if apart is None else not apart


def _windows(
    keys: Config, fields: Config, layers: int, name: str
) -> tuple[int | None, ...]:
    swa = fields.get("use_swa")
    usual = SLIDING if swa else FULL
    kinds = keys.get("layer_types") or [usual] * layers
    key = "swa_window_size" if fields.get("swa_window_size") else "sliding_window"
    windows = layer_windows(kinds, layers, keys, key, name)
    if swa is not None and bool(swa) == (SLIDING not in kinds):
        raise ModelFolderError(
            f"config.json of the {name} has use_swa {swa!r} and layer_types {kinds}, "
            "which contradict each other. Take out the one that is wrong."
        )
    return windows
