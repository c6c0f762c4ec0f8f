"""Models: an mlx-lm model with its caches (a lane), hooks, loading, draft heads.

This package does not know how tokens are chosen. This module exports what other
packages use. The package of one kind of head, such as `models.mtp`, exports its own
names.
"""

from mlx_speculation.models.checkpoints.convention import MtpConvention
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.device_ops import CompiledForward
from mlx_speculation.models.exclusions import check_causal, check_resumable, why_alone
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.lazy_arrays import evaluate_held
from mlx_speculation.models.introspect.position_table import (
    check_positions,
    position_table,
)
from mlx_speculation.models.introspect.reduced_output import ReducedEnds, ReducedOutput
from mlx_speculation.models.introspect.taps import States
from mlx_speculation.models.lanes.base import RequestLane, RequestRound
from mlx_speculation.models.lanes.batch import BatchLane
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
from mlx_speculation.models.lanes.submit_layers import PART_SIZES, usual_part
from mlx_speculation.models.load_model import check_target, load, mlx_lm_speed, wired
from mlx_speculation.models.model_folder import (
    check_model_folder,
    is_there,
    model_folder,
)
from mlx_speculation.models.ops.dispatch import compiled_steps
from mlx_speculation.models.quantize import check_bits, quantize_weights
from mlx_speculation.models.round_context import cuda_serves
from mlx_speculation.models.shape_buckets import RowSizes, row_size
from mlx_speculation.models.sharding import (
    Group,
    Parallel,
    broadcast,
    can_join_output,
    gathered,
    has_split_output,
    joined_output,
    keeps_rows_alone,
    mark_of,
    spread_as,
)
from mlx_speculation.models.token_ids import (
    TokenIds,
    check_same_ids,
    context_length,
    logit_width,
    wrapped,
)

__all__ = [
    "PART_SIZES",
    "PREFILL_STEP",
    "BatchLane",
    "CommittedStates",
    "CompiledForward",
    "Group",
    "HiddenStates",
    "Lane",
    "LaneRound",
    "ModelHooks",
    "MtpConvention",
    "Parallel",
    "PrefillBudget",
    "ReducedEnds",
    "ReducedOutput",
    "RequestLane",
    "RequestRound",
    "RestorePoints",
    "RowSizes",
    "Sliding",
    "States",
    "TokenIds",
    "TreeForward",
    "TreeHooks",
    "broadcast",
    "can_join_output",
    "check_bits",
    "check_causal",
    "check_fixed_shape",
    "check_model_folder",
    "check_positions",
    "check_resumable",
    "check_same_ids",
    "check_target",
    "check_tree_model",
    "checked_quantization",
    "compiled_steps",
    "context_length",
    "cuda_serves",
    "evaluate_held",
    "find_parts",
    "gathered",
    "has_split_output",
    "is_there",
    "joined_output",
    "keep_path",
    "keeps_rows_alone",
    "load",
    "logit_width",
    "mark_of",
    "mlx_lm_speed",
    "model_folder",
    "plans_by_keys",
    "position_table",
    "quantize_weights",
    "read_config",
    "rehearse",
    "row_size",
    "shape_of_round",
    "spread_as",
    "tree_forward",
    "tree_rows",
    "usual_part",
    "usual_prefill_step",
    "why_alone",
    "wired",
    "wrapped",
]
