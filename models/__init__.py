"""Models: an mlx-lm model with its caches as one lane, recording, loading, pairing.

It knows mlx-lm's models and tokenizers. It does not know how tokens are chosen.
"""

from mlx_speculation.models.assistant import Assistant, AssistantOutput, Read
from mlx_speculation.models.assistant_config import is_assistant
from mlx_speculation.models.assistant_loading import load_assistant
from mlx_speculation.models.assistant_probe import (
    Anchor,
    position_of,
    probe_anchor,
    starts_for,
)
from mlx_speculation.models.batch_lane import BatchLane, BatchRound
from mlx_speculation.models.batch_slots import BatchSlots, BatchSlotsRound
from mlx_speculation.models.batch_states import BatchStates, Unread
from mlx_speculation.models.batching import why_alone
from mlx_speculation.models.committed import CommittedStates
from mlx_speculation.models.compiled_steps import CompiledSteps, compiled_steps
from mlx_speculation.models.contract import Contract
from mlx_speculation.models.contract_fields import contract_of
from mlx_speculation.models.dflash_config import is_dflash
from mlx_speculation.models.dflash_context import DFlashContext
from mlx_speculation.models.dflash_head import DFlash, DFlashHead
from mlx_speculation.models.dflash_loading import load_dflash
from mlx_speculation.models.eagle_config import LayerIds, is_eagle, layer_readings
from mlx_speculation.models.eagle_head import Eagle, EagleHead
from mlx_speculation.models.eagle_loading import load_eagle_head
from mlx_speculation.models.eagle_probe import probe_layers
from mlx_speculation.models.finding import find_parts
from mlx_speculation.models.hidden_states import HiddenStates
from mlx_speculation.models.in_round import cuda_serves, on_cpu
from mlx_speculation.models.kept_files import write_json
from mlx_speculation.models.lane import PREFILL_STEP, Lane, LaneRound, Sliding
from mlx_speculation.models.lazy_arrays import evaluate_held
from mlx_speculation.models.loading import (
    check_model_folder,
    is_there,
    load,
    model_folder,
)
from mlx_speculation.models.mlx_lm_api import (
    GenerationResponse,
    check_quantizable,
    drawn_seed,
    greedy_sampler,
    make_prompt_cache,
)
from mlx_speculation.models.model_config import read_config
from mlx_speculation.models.mtp_contracts import load_mtp_head, usual_contract
from mlx_speculation.models.mtp_files import is_split_head
from mlx_speculation.models.mtp_head import Mtp, MtpHead, MtpOutput
from mlx_speculation.models.mtp_loading import find_mtp_head
from mlx_speculation.models.mtp_slots import MtpSlots, OnTarget, Slots
from mlx_speculation.models.notices import notice
from mlx_speculation.models.pair_files import PairFile, read_pair
from mlx_speculation.models.pairing import (
    TokenIds,
    check_same_ids,
    logit_width,
    wrapped,
)
from mlx_speculation.models.parts import Parts
from mlx_speculation.models.prompt_files import load_prompt
from mlx_speculation.models.quantizing import check_bits, quantize_weights, weight_bytes
from mlx_speculation.models.ranks import (
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
from mlx_speculation.models.recording import Recorders
from mlx_speculation.models.reduced_output import ReducedEnds, ReducedOutput
from mlx_speculation.models.restore_points import RestorePoints
from mlx_speculation.models.row_sizes import RowSizes, row_size
from mlx_speculation.models.rows import check_causal, check_resumable
from mlx_speculation.models.running import mlx_lm_speed, wired
from mlx_speculation.models.shared_kv import SharedKv
from mlx_speculation.models.taps import States
from mlx_speculation.models.transposed import transposed_weights
from mlx_speculation.samplers.constraints.llguidance import json_schema, lark, regex

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
    "CompiledSteps",
    "Contract",
    "DFlash",
    "DFlashContext",
    "DFlashHead",
    "Eagle",
    "EagleHead",
    "GenerationResponse",
    "Group",
    "HiddenStates",
    "Lane",
    "LaneRound",
    "LayerIds",
    "Mtp",
    "MtpHead",
    "MtpOutput",
    "MtpSlots",
    "OnTarget",
    "PairFile",
    "Parallel",
    "Parts",
    "Read",
    "Recorders",
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
    "check_quantizable",
    "check_resumable",
    "check_same_ids",
    "compiled_steps",
    "contract_of",
    "cuda_serves",
    "drawn_seed",
    "evaluate_held",
    "find_mtp_head",
    "find_parts",
    "gathered",
    "greedy_sampler",
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
    "load_prompt",
    "logit_width",
    "make_prompt_cache",
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
    "told",
    "transposed_weights",
    "usual_contract",
    "weight_bytes",
    "why_alone",
    "wired",
    "wrapped",
    "write_json",
]
