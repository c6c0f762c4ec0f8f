"""Loading a DFlash2 drafter from its folder into a module."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.nn as nn

from mlx_speculation.errors import InvalidRequestError, ModelFolderError
from mlx_speculation.models.checkpoints.joined_head import Loaded, OwnEnds
from mlx_speculation.models.checkpoints.layer_readings import LayerIds
from mlx_speculation.models.checkpoints.tensor_kind import check_kind
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.dflash import DFlashSettings, build, read_blocks
from mlx_speculation.models.dflash.config import Anchor
from mlx_speculation.models.dflash2.config import NAME, DFlash2Settings, read_settings
from mlx_speculation.models.dflash2.head import DFlash2, DFlash2Head
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.token_ids import logit_width


def load_dflash2(
    folder: str | Path,
    model: nn.Module,
    *,
    layer_ids: LayerIds | None = None,
    anchor: Anchor | None = None,
    starts: Sequence[Sequence[int]] | None = None,
) -> Loaded:
    """Load the DFlash2 drafter in a folder of its own; see `load_dflash`.

    Raises:
        InvalidRequestError: `anchor` is "samples".
        ModelFolderError: the drafter is of another kind or target, or not complete.
        ConventionError: the drafter is no better than chance, whatever layers it reads.
    """
    if anchor == "samples":
        raise InvalidRequestError(
            f"anchor is 'samples', but a {NAME} has anchor 'given': each row predicts "
            "the token at its own position. Leave anchor out."
        )
    folder = Path(folder).expanduser()
    config = read_config(folder)
    weights = read_blocks(folder, NAME)
    check_kind(weights, "dflash2")
    settings = read_settings(config)
    if "lm_head.weight" not in weights:
        settings = _on_target(settings, model)
    vocab = logit_width(model)
    known = weights.get("candidate_selector.predecessor_codebook")
    rows = vocab if known is None else known.shape[0]
    if rows < vocab:
        raise ModelFolderError(
            f"The selector of the {NAME} has {rows} ids, but the target has {vocab}. "
            "Choose the drafter of this target."
        )

    def make(blocks: DFlashSettings, width: int, ends: OwnEnds) -> DFlash2Head:
        return DFlash2Head(settings, width, ends, rows)

    return build(
        config,
        weights,
        model,
        settings.blocks,
        make,
        name=NAME,
        on_target=DFlash2,
        layer_ids=layer_ids,
        anchor="given",
        starts=starts,
    )


def _on_target(settings: DFlash2Settings, model: nn.Module) -> DFlash2Settings:
    """Return settings without the cap, if the target's output layer applies it."""
    caps = {
        getattr(getattr(part, key, None), "final_logit_softcapping", None)
        for part in model.modules()
        for key in ("args", "config")
    }
    if settings.softcap in caps:
        settings = replace(settings, softcap=None)
    changed = settings.softcap is not None or settings.logit_scale != 1
    if changed and not find_parts(model).bare:
        raise ModelFolderError(
            f"config.json of the {NAME} has final_logit_softcapping "
            f"{settings.softcap} and output_multiplier {settings.logit_scale}, and "
            "this target's output layer has a scale or cap of its own: it is not known "
            "if both apply. Take these keys out of config.json if they repeat the "
            "target's."
        )
    return settings
