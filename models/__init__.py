"""Models: an mlx-lm model with its caches as one lane, recording, loading, pairing.

It knows mlx-lm's models and tokenizers. It does not know how tokens are chosen.
"""

from mlx_speculation.json_files import write_json
from mlx_speculation.models.checkpoints.convention import MtpConvention, convention_of
from mlx_speculation.models.checkpoints.draft_head import MtpOutput, OnTarget, Slots
from mlx_speculation.models.checkpoints.speculation_json import PairFile, read_pair
from mlx_speculation.models.config_json import read_config
from mlx_speculation.models.device_ops import CompiledForward
from mlx_speculation.models.dflash.cache import DFlashContext
from mlx_speculation.models.dflash.config import is_dflash
from mlx_speculation.models.dflash.head import DFlash, DFlashHead
from mlx_speculation.models.dflash.load import load_dflash
from mlx_speculation.models.eagle.config import LayerIds, is_eagle, layer_readings
from mlx_speculation.models.eagle.head import Eagle, EagleHead
from mlx_speculation.models.eagle.load import load_eagle_head
from mlx_speculation.models.eagle.probe import probe_layers
from mlx_speculation.models.exclusions import check_causal, check_resumable, why_alone
from mlx_speculation.models.gemma_assistant.config import is_assistant
from mlx_speculation.models.gemma_assistant.load import load_assistant
from mlx_speculation.models.gemma_assistant.network import (
    Assistant,
    AssistantOutput,
    Read,
)
from mlx_speculation.models.gemma_assistant.probe import (
    Anchor,
    position_of,
    probe_anchor,
    starts_for,
)
from mlx_speculation.models.gemma_assistant.shared_kv import SharedKv
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.lazy_arrays import evaluate_held
from mlx_speculation.models.introspect.parts import Parts
from mlx_speculation.models.introspect.reduced_output import ReducedEnds, ReducedOutput
from mlx_speculation.models.introspect.taps import States
from mlx_speculation.models.lanes.batch_lane import BatchLane, BatchRound
from mlx_speculation.models.lanes.batch_states import BatchStates, Unread
from mlx_speculation.models.lanes.committed_states import CommittedStates
from mlx_speculation.models.lanes.install_hooks import ModelHooks
from mlx_speculation.models.lanes.lane import PREFILL_STEP, Lane, LaneRound, Sliding
from mlx_speculation.models.lanes.restore_points import RestorePoints
from mlx_speculation.models.load_model import load
from mlx_speculation.models.model_folder import (
    check_model_folder,
    is_there,
    model_folder,
)
from mlx_speculation.models.mtp.batch_cache import BatchSlots, BatchSlotsRound
from mlx_speculation.models.mtp.cache import MtpSlots
from mlx_speculation.models.mtp.files import is_split_head
from mlx_speculation.models.mtp.head import Mtp, MtpHead
from mlx_speculation.models.mtp.load import find_mtp_head
from mlx_speculation.models.mtp.load_with_convention import (
    load_mtp_head,
    usual_convention,
)
from mlx_speculation.models.ops.dispatch import compiled_steps, stream_resources
from mlx_speculation.models.quantize import check_bits, quantize_weights, weight_bytes
from mlx_speculation.models.round_context import cuda_serves, on_cpu
from mlx_speculation.models.shape_buckets import RowSizes, row_size
from mlx_speculation.models.sharding import (
    Group,
    Parallel,
    can_join_output,
    check_parallel,
    gathered,
    has_split_output,
    joined_output,
    keeps_rows_alone,
    mark_of,
    spread,
    spread_as,
    told,
)
from mlx_speculation.models.token_ids import (
    TokenIds,
    check_same_ids,
    logit_width,
    wrapped,
)
from mlx_speculation.models.wired_limit import mlx_lm_speed, wired
from mlx_speculation.samplers.constraints.llguidance import json_schema, lark, regex
from mlx_speculation.warn import notice

__all__ = [
    "PREFILL_STEP",
    "Anchor",
    "Assistant",
    "AssistantOutput",
    "BatchLane",
    "BatchRound",
    "BatchSlots",
    "BatchSlotsRound",
    "BatchStates",
    "CommittedStates",
    "CompiledForward",
    "DFlash",
    "DFlashContext",
    "DFlashHead",
    "Eagle",
    "EagleHead",
    "Group",
    "HiddenStates",
    "Lane",
    "LaneRound",
    "LayerIds",
    "ModelHooks",
    "Mtp",
    "MtpConvention",
    "MtpHead",
    "MtpOutput",
    "MtpSlots",
    "OnTarget",
    "PairFile",
    "Parallel",
    "Parts",
    "Read",
    "ReducedEnds",
    "ReducedOutput",
    "RestorePoints",
    "RowSizes",
    "SharedKv",
    "Sliding",
    "Slots",
    "States",
    "TokenIds",
    "Unread",
    "can_join_output",
    "check_bits",
    "check_causal",
    "check_model_folder",
    "check_parallel",
    "check_resumable",
    "check_same_ids",
    "compiled_steps",
    "convention_of",
    "cuda_serves",
    "evaluate_held",
    "find_mtp_head",
    "find_parts",
    "gathered",
    "has_split_output",
    "is_assistant",
    "is_dflash",
    "is_eagle",
    "is_split_head",
    "is_there",
    "joined_output",
    "json_schema",
    "keeps_rows_alone",
    "lark",
    "layer_readings",
    "load",
    "load_assistant",
    "load_dflash",
    "load_eagle_head",
    "load_mtp_head",
    "logit_width",
    "mark_of",
    "mlx_lm_speed",
    "model_folder",
    "notice",
    "on_cpu",
    "position_of",
    "probe_anchor",
    "probe_layers",
    "quantize_weights",
    "read_config",
    "read_pair",
    "regex",
    "row_size",
    "spread",
    "spread_as",
    "starts_for",
    "stream_resources",
    "told",
    "usual_convention",
    "weight_bytes",
    "why_alone",
    "wired",
    "wrapped",
    "write_json",
]
