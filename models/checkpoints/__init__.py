"""Parts that all kinds of draft heads share: files, probes, speculation.json.

A probe on a short text finds the convention that a drafter was trained with.
"""

from mlx_speculation.models.checkpoints.convention import convention_of
from mlx_speculation.models.checkpoints.draft_head import (
    ChooseNext,
    HeadOnTarget,
    HeadOutput,
    HeadState,
    ParallelHead,
)
from mlx_speculation.models.checkpoints.joined_head import Loaded
from mlx_speculation.models.checkpoints.layer_readings import LayerIds
from mlx_speculation.models.checkpoints.speculation_json import PairFile, read_pair
from mlx_speculation.models.checkpoints.tensor_kind import (
    kind_by_tensors,
    tensor_names,
)

__all__ = [
    "ChooseNext",
    "HeadOnTarget",
    "HeadOutput",
    "HeadState",
    "LayerIds",
    "Loaded",
    "PairFile",
    "ParallelHead",
    "convention_of",
    "kind_by_tensors",
    "read_pair",
    "tensor_names",
]
