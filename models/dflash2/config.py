"""Configuration of DFlash2 drafters, from config.json."""

from dataclasses import dataclass

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import Config, number
from mlx_speculation.models.dflash import DFlashSettings, block_settings, own_keys

NAME = "DFlash2 drafter"


@dataclass(frozen=True, slots=True)
class DFlash2Settings:
    """The config.json of a DFlash2 drafter."""

    blocks: DFlashSettings
    taps: int  # see `BlockConvolution`
    group: int  # see `BlockConvolution`
    rank: int  # the rank of the selector's matrices
    top: int  # the number of candidates for each drafted token
    vocab: int | None  # candidates are ids below this number; None: all ids
    softcap: float | None  # the drafter's cap of logits; None: the drafter has no cap
    embedding_scale: float  # a factor of the embeddings, after the target's own factor
    logit_scale: float  # a factor of the logits before the cap


def is_dflash2(config: Config) -> bool:
    """Return whether a config.json is that of a DFlash2 drafter."""
    return (
        "dflash2" in str(config.get("architectures")).lower()
        or config.get("speculators_model_type") == "dflash2"
        or own_keys(config).get("projector_type") == "dflash2"
    )


def read_settings(config: Config) -> DFlash2Settings:
    """Read config.json.

    Raises:
        ModelFolderError: a value is missing or not supported.
    """
    fields = own_keys(config)
    speculators = config.get("speculators_model_type") is not None
    # In files of the library `speculators`, sliding layers are not causal by default.
    blocks = block_settings(config, NAME, causal=not speculators)
    if blocks.anchor != "given":
        raise ModelFolderError(
            f"config.json of the {NAME} has sample_from_anchor true, but drafts of "
            "this kind begin after the anchor. Choose another drafter."
        )
    group, dim = number(fields, "conv_group_size", NAME, 16), blocks.layers.hidden_size
    if dim % group:
        raise ModelFolderError(
            f"conv_group_size {group} in config.json of the {NAME} does not divide "
            f"hidden_size {dim}. Correct config.json, or choose another drafter."
        )
    softcap = fields.get("final_logit_softcapping")
    return DFlash2Settings(
        blocks=blocks,
        taps=number(fields, "conv_kernel_size", NAME, 2),
        group=group,
        rank=number(fields, "selector_rank", NAME, 256),
        top=number(fields, "selector_top_k", NAME, 16),
        vocab=number(fields, "vocab_size", NAME) if fields.get("vocab_size") else None,
        softcap=float(softcap) if softcap else None,
        embedding_scale=float(fields.get("input_embedding_scale") or 1.0),
        logit_scale=float(fields.get("output_multiplier") or 1.0),
    )
