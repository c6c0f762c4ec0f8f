"""A lane: a model, its caches, and the tokens that they hold.

`base` has the protocols, `single` a lane of one request, `batch` a lane of many. A
round on a lane is fed, then committed or rolled back as a whole. Lanes do not know how
tokens are drafted or accepted.
"""

from mlx_speculation.models.lanes.base import RequestLane, RequestRound
from mlx_speculation.models.lanes.batch import BatchLane, BatchRound
from mlx_speculation.models.lanes.committed_states import CommittedStates
from mlx_speculation.models.lanes.draft_tree import (
    TreeForward,
    TreeHooks,
    check_tree_model,
    keep_path,
    tree_forward,
    tree_rows,
)
from mlx_speculation.models.lanes.fixed_shape import check_fixed_shape
from mlx_speculation.models.lanes.install_hooks import ModelHooks
from mlx_speculation.models.lanes.prefill_step import (
    PREFILL_STEP,
    PrefillBudget,
    usual_prefill_step,
)
from mlx_speculation.models.lanes.quantizable import checked_quantization
from mlx_speculation.models.lanes.rehearsal import (
    plans_by_keys,
    rehearse,
    shape_of_round,
)
from mlx_speculation.models.lanes.restore_points import RestorePoints
from mlx_speculation.models.lanes.single import Lane, LaneRound, Sliding

__all__ = [
    "PREFILL_STEP",
    "BatchLane",
    "BatchRound",
    "CommittedStates",
    "Lane",
    "LaneRound",
    "ModelHooks",
    "PrefillBudget",
    "RequestLane",
    "RequestRound",
    "RestorePoints",
    "Sliding",
    "TreeForward",
    "TreeHooks",
    "check_fixed_shape",
    "check_tree_model",
    "checked_quantization",
    "keep_path",
    "plans_by_keys",
    "rehearse",
    "shape_of_round",
    "tree_forward",
    "tree_rows",
    "usual_prefill_step",
]
