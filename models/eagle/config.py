"""Configuration of EAGLE-3 heads, from config.json.

Five dialects are read: that of SGLang and SpecForge, that of vLLM, that of the authors
of EAGLE-3, that of DeepSpec, and that of the library `speculators`. The last one has
the sizes of the layers in a nested part. A list of the target's layers holds indices of
layers ("layers") or of the tuple of hidden states ("tuple"), see `layer_readings.py`.

A head with `use_aux_hidden_state` false reads only the target's last state: the output
of the last layer ("layers"), or that of the final norm, which ends the tuple ("tuple").
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_lm.models import gemma4_text, llama

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    layer_args,
    layer_part,
    layer_windows,
    number,
    proposed_tokens,
)
from mlx_speculation.models.checkpoints.gemma_layers import gemma_args
from mlx_speculation.models.checkpoints.joined_head import check_layers
from mlx_speculation.models.checkpoints.layer_readings import (
    LayerIds,
    LayerReadings,
    check_counts,
    read_layers,
    usual_of_eagle,
)
from mlx_speculation.models.checkpoints.rotation import FULL, Rotation, rotations_of
from mlx_speculation.models.config_json import nested

QueryNorms = Literal["each", "together"]
NAME = "EAGLE-3 head"
# Stands for the output of the target's final norm in a list of layers.
AFTER_NORM = -2
_MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True)
class Masks:
    """The mask of a P-EAGLE head, which stands for tokens that are not drafted yet."""

    token: int
    depth: int | None = None  # largest number of tokens in a draft; None: any


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """An EAGLE-3 head's config.json."""

    layer: llama.ModelArgs
    target_dim: int  # the hidden size of the target
    draft_vocab: int | None  # size of the draft vocabulary; None: not stated
    norm_before_residual: bool  # whether the residual is the state after its norm
    norm_before_fc: bool  # whether config.json says that a norm comes before `fc`
    norm_output: bool  # whether the next step reads the normed output
    windows: tuple[int | None, ...] = (None,)  # of each layer; None: no window
    rotations: tuple[Rotation, ...] = (Rotation(),)  # of each layer
    logit_scale: float = 1.0
    tied: bool = False  # whether its embedding is its output layer too
    projected: bool = True  # whether the target's states go through `fc`
    query_norms: QueryNorms | None = None  # norms of queries and keys; None: no norms
    gemma: gemma4_text.ModelArgs | None = None  # None: the layer is not Gemma 4's
    # Sizes of latent attention (MLA), as in mlx-lm's Youtu-LLM; None: no MLA
    latents: dict[str, Any] | None = None
    mask: Masks | None = None

    def args_of(self, index: int) -> llama.ModelArgs:
        """Return the arguments of a layer."""
        turn = self.rotations[index]
        return replace(self.layer, rope_theta=turn.theta, rope_scaling=turn.scaling)


def is_peagle(config: Config) -> bool:
    """Return whether a config.json states that its head is P-EAGLE.

    Not every config.json of a P-EAGLE head does.
    """
    return (
        config.get("speculators_model_type") == "peagle"
        or "peagle" in str(config.get("architectures")).lower()
    )


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
        ModelFolderError: a value is missing or not supported.
    """
    fields = layer_part(config)
    count = number(fields, "num_hidden_layers", NAME, 1)
    gemma = gemma_args(config, NAME)
    if gemma is not None and count > 1:
        raise ModelFolderError(
            f"config.json of the {NAME} has num_hidden_layers {count}, but only 1 is "
            "supported for Gemma 4. Choose another drafter."
        )
    kinds = fields.get("layer_types") or [FULL] * count
    windows = layer_windows(kinds, count, fields, "sliding_window", NAME)
    rotations = rotations_of(config, NAME, windows)
    layer = layer_args(
        fields, NAME, llama.ModelArgs, rotations=rotations, gemma=gemma is not None
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
        windows=windows,
        rotations=rotations,
        logit_scale=float(config.get("logit_scale") or 1.0),
        tied=config.get("tie_word_embeddings") is True,
        gemma=gemma,
        latents=_latents(fields),
        mask=_masks(config),
    )


def _latents(fields: Config) -> dict[str, Any] | None:
    if fields.get("kv_lora_rank") is None:
        return None
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    ranked = fields.get("q_lora_rank") is not None
    return {
        **{key: number(fields, key, NAME) for key in sizes},
        "q_lora_rank": number(fields, "q_lora_rank", NAME) if ranked else None,
        "rope_traditional": fields.get("rope_interleave") is not False,
    }


def _masks(config: Config) -> Masks | None:
    named = [nested(config, "dflash_config", "mask_token_id")]
    named += [config.get(key) for key in _MASKS]
    result = next((token for token in named if token is not None), None)
    if not isinstance(result, int) or isinstance(result, bool) or result < 0:
        return None
    depth = proposed_tokens(config)
    return Masks(result, depth if isinstance(depth, int) and depth > 0 else None)


def layer_readings(
    config: Config,
    trunk: int,
    features: Sequence[int] = (),
    counts: LayerIds | None = None,
) -> LayerReadings:
    """Return the candidate lists of target layers to read, the usual list first.

    Layers are counted from 0; -1 stands for the embeddings, `AFTER_NORM` for the output
    of the final norm. The target has `trunk` layers. `features` has each possible
    number of layers that the head reads; empty: unknown. `counts` says how the list in
    config.json counts; None: both ways are candidates.

    Raises:
        ModelFolderError: the target lacks a listed layer; `fc` takes another number of
            layers; or there is no list, and there are no usual layers for the count
            that `fc` reads.
        InvalidRequestError: `counts` is no way of counting.
    """
    if nested(config, "eagle_config", "use_aux_hidden_state") is False:
        check_counts(counts)
        check_layers([trunk - 1], NAME, trunk=trunk)
        if features and 1 not in features:
            raise ModelFolderError(
                f"fc of the {NAME} takes {' or '.join(map(str, features))} layers of "
                "the target, but config.json has use_aux_hidden_state false, with "
                f"which it has to take 1. Choose the {NAME} of this target."
            )
        last: dict[LayerIds, tuple[tuple[int, ...], str]] = {
            "tuple": ((AFTER_NORM,), "'tuple' after the norm"),
            "layers": ((trunk - 1,), f"'layers' {[trunk - 1]}"),
        }
        chosen = last if counts is None else {counts: last[counts]}
        return LayerReadings(dict(chosen.values()), NAME)
    return read_layers(
        config,
        NAME,
        trunk=trunk,
        features=features,
        usual=usual_of_eagle,
        usual_count=3,
        counts=counts,
        arranged=lambda layers: tuple(sorted(set(layers))),
        advice=", or say what its list counts: layer_ids='layers' or 'tuple'",
    )


def _flag(config: Config, key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        value = nested(config, "eagle_config", key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelFolderError(
            f"config.json of the {NAME} has {key} {value!r}, which has to be true or "
            "false."
        )
    return value
