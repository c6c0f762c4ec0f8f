"""The engine: rounds, drafters, streams and the generator.

The engine imports the packages of models, caches and samplers. None of them imports
the engine.
"""

from mlx_speculation.engine.batch.generator import BatchGenerator
from mlx_speculation.engine.batch.results import BatchResponse, BatchStatistics
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Feedback, Plan
from mlx_speculation.engine.drafters.base import Choose, Drafter, Proposal
from mlx_speculation.engine.drafters.block_drafters import (
    DFlash2Draft,
    DFlashDraft,
    DSparkDraft,
)
from mlx_speculation.engine.drafters.cascade import CascadeDraft
from mlx_speculation.engine.drafters.draft import Draft
from mlx_speculation.engine.drafters.eagle import EagleDraft, PEagleDraft
from mlx_speculation.engine.drafters.gemma_assistant import (
    AssistantDraft,
    AssistantDrafter,
)
from mlx_speculation.engine.drafters.mtp import MtpDraft, MtpDrafter
from mlx_speculation.engine.drafters.reduced_vocabulary import reduced_vocabulary
from mlx_speculation.engine.generator import SpeculativeGenerator
from mlx_speculation.engine.lookup.drafter import LookupDraft
from mlx_speculation.engine.mlx_lm_compat.response import SpeculativeResponse
from mlx_speculation.engine.mlx_lm_compat.stream_generate import (
    generate,
    stream_generate,
)
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.result import Chunk, Origin, Result
from mlx_speculation.engine.stats import DrafterFault, SourceCounts, Statistics
from mlx_speculation.engine.stream import Stream

__all__ = [
    "AssistantDraft",
    "AssistantDrafter",
    "BatchGenerator",
    "BatchResponse",
    "BatchStatistics",
    "CascadeDraft",
    "Choose",
    "Chunk",
    "DFlash2Draft",
    "DFlashDraft",
    "DSparkDraft",
    "Draft",
    "DraftLengthPolicy",
    "Drafter",
    "DrafterFault",
    "EagleDraft",
    "Feedback",
    "LookupDraft",
    "MtpDraft",
    "MtpDrafter",
    "Origin",
    "PEagleDraft",
    "Plan",
    "Proposal",
    "Result",
    "Sequence",
    "SourceCounts",
    "SpeculativeGenerator",
    "SpeculativeResponse",
    "Statistics",
    "Stream",
    "generate",
    "reduced_vocabulary",
    "stream_generate",
]
