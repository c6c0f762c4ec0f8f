"""Loading a DSpark drafter from a folder or a GGUF file into a module.

A confidence head, which says where to end a draft, is not loaded: running it in each
round costs about as much time as shorter drafts save.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import (
    Config,
    Weights,
    renamed,
)
from mlx_speculation.models.checkpoints.joined_head import Loaded, OwnEnds
from mlx_speculation.models.checkpoints.layer_readings import LayerIds
from mlx_speculation.models.checkpoints.tensor_kind import check_kind
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.dflash import (
    Anchor,
    DFlashSettings,
    build,
    read_blocks,
)
from mlx_speculation.models.dspark.config import (
    NAME,
    DSparkSettings,
    Markov,
    read_settings,
)
from mlx_speculation.models.dspark.gguf import gguf_file, read_gguf
from mlx_speculation.models.dspark.head import DSpark, DSparkHead
from mlx_speculation.models.token_ids import logit_width

_OTHER_NAMES = {
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "log_snr_fc1.": "log_snr.log_snr_fc1.",
    "log_snr_fc2.": "log_snr.log_snr_fc2.",
}


def load_dspark(
    folder: str | Path,
    model: nn.Module,
    *,
    layer_ids: LayerIds | None = None,
    anchor: Anchor | None = None,
    starts: Sequence[Sequence[int]] | None = None,
) -> Loaded:
    """Load the DSpark drafter in a folder or GGUF file of its own; see `load_dflash`.

    Raises:
        ModelFolderError: the drafter is of another kind or target, or not complete.
        ConventionError: the drafter scores no better than chance, however its layer ids
            and its anchor are read.
    """
    config, weights = _read(Path(folder).expanduser())
    settings = _by_tensors(read_settings(config), weights)

    def make(blocks: DFlashSettings, width: int, ends: OwnEnds) -> DSparkHead:
        table, vocab = weights.get("markov_head.markov_w1.weight"), logit_width(model)
        return DSparkHead(
            replace(settings, blocks=blocks),
            width,
            ends,
            rows=vocab if table is None else table.shape[0],
            columns=ends.output or vocab,
        )

    return build(
        config,
        weights,
        model,
        settings.blocks,
        make,
        name=NAME,
        on_target=DSpark,
        layer_ids=layer_ids,
        anchor=anchor,
        starts=starts,
    )


def _read(folder: Path) -> tuple[Config, Weights]:
    file = gguf_file(folder)
    config, weights = (
        (read_config(folder), read_blocks(folder, NAME))
        if file is None
        else read_gguf(file)
    )
    result = renamed(weights, _OTHER_NAMES)
    for name in [each for each in result if each.startswith("confidence_head.")]:
        del result[name]
    check_kind(result, "dspark")
    return config, result


def _by_tensors(settings: DSparkSettings, weights: Weights) -> DSparkSettings:
    """Return settings with the Markov head that the tensors show."""
    table = weights.get("markov_head.markov_w1.weight")
    if table is None:
        if settings.rank:
            raise ModelFolderError(
                f"config.json of the {NAME} has markov_rank {settings.rank}, but the "
                "weights have no markov_head. Take a whole checkpoint."
            )
        return settings
    kind: Markov = "vanilla"
    if "markov_head.gate_proj.weight" in weights:
        kind = "gated"
    elif "markov_head.joint_proj.weight" in weights:
        kind = "rnn"
    packed = "markov_head.markov_w1.scales" in weights
    rank = settings.rank if packed else table.shape[1]
    return replace(settings, rank=rank, markov=kind)
