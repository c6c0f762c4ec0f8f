"""Configuration of DSpark drafters, from config.json, in each of its packagings.

    DeepSpec        flat: a copy of the target's config.json with more keys
    speculators     sizes in `transformer_layer_config`, the rest flat
    SpecForge       `dflash_config` with projector_type "dspark"
    LiquidAI        SpecForge's keys without projector_type
    NVIDIA          DeepSpec's keys and `dflash_config`; row 0 of a block drafts nothing
    PrismML         GGUF, which `gguf` turns into flat keys

DeepSpec's "dflash" checkpoints are DSpark drafters without a Markov head. The drafter
inside DeepSeek V4's checkpoint has other layers, and is not supported.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from mlx_lm.models import gemma4_text

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import Config, number
from mlx_speculation.models.checkpoints.gemma_layers import gemma_args
from mlx_speculation.models.dflash import DFlashSettings, block_settings, own_keys

NAME = "DSpark drafter"
Markov = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, slots=True)
class LogSnr:
    """Log signal-to-noise ratios; their embeddings are added to those of a block."""

    least: float  # the ratio of masks
    most: float  # the ratio of the newest token, row 0 of a block


@dataclass(frozen=True, slots=True)
class DSparkSettings:
    """The settings of a DSpark drafter, from config.json."""

    blocks: DFlashSettings
    rank: int  # the rank of the Markov head; 0: there is no such head
    markov: Markov
    gemma: gemma4_text.ModelArgs | None = None  # None: the layers are Qwen 3's
    log_snr: LogSnr | None = None


def is_dspark(config: Config) -> bool:
    """Return whether a config.json is that of a DSpark drafter."""
    fields = own_keys(config)
    return bool(
        "dspark" in str(config.get("architectures")).lower()
        or config.get("speculators_model_type") == "dspark"
        or fields.get("projector_type") == "dspark"
        or fields.get("markov_rank")
        or "dspark_block_size" in config
    )


def read_settings(config: Config) -> DSparkSettings:
    """Read config.json.

    Raises:
        ModelFolderError: a value is missing or not supported.
    """
    fields = own_keys(config)
    if "dspark_block_size" in config:
        raise ModelFolderError(
            f"config.json has dspark_block_size {config['dspark_block_size']!r}: the "
            f"model is a DeepSeek V4 with a {NAME} inside, whose layers are not "
            "supported. Choose another drafter."
        )
    gemma = gemma_args(config, NAME)
    blocks = block_settings(
        config, NAME, anchor="samples", gemma=gemma is not None, copied=True
    )
    rank = fields.get("markov_rank") or 0
    kind: Any = fields.get("markov_head_type") or "vanilla"
    if kind not in get_args(Markov):
        raise ModelFolderError(
            f"markov_head_type {kind!r} in config.json of the {NAME} is not supported; "
            f"supported are {', '.join(get_args(Markov))}. Choose another drafter."
        )
    return DSparkSettings(
        blocks=blocks,
        rank=number(fields, "markov_rank", NAME) if rank else 0,
        markov=kind,
        gemma=gemma,
        log_snr=_log_snr(fields),
    )


def _log_snr(fields: Config) -> LogSnr | None:
    if not fields.get("log_snr_conditioning"):
        return None
    ends = fields.get("min_log_snr"), fields.get("max_log_snr")
    if not all(isinstance(end, int | float) for end in ends) or ends[0] == ends[1]:
        raise ModelFolderError(
            f"config.json of the {NAME} has min_log_snr {ends[0]!r} and max_log_snr "
            f"{ends[1]!r}; log_snr_conditioning needs two different numbers. Correct "
            "config.json, or choose another drafter."
        )
    least, most = (float(end) for end in ends)  # type: ignore[arg-type]
    return LogSnr(least, most)
