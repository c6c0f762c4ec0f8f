"""The engine: rounds, drafters, streams and the generator.

It knows models, caches and samplers through their own words. Nothing but the front
door and the scripts imports it.
"""

from mlx_speculation.engine.assistant import AssistantDraft, AssistantDrafter
from mlx_speculation.engine.batch import BatchGenerator
from mlx_speculation.engine.batch_results import BatchResponse, BatchStatistics
from mlx_speculation.engine.cascade import Cascade
from mlx_speculation.engine.dflash import DFlashDraft
from mlx_speculation.engine.drafting import Choose, Draft, Drafter
from mlx_speculation.engine.drop_in import generate, stream_generate
from mlx_speculation.engine.eagle import EagleDraft
from mlx_speculation.engine.generator import SpeculativeGenerator
from mlx_speculation.engine.lengths import Lengths, Outcome, Plan
from mlx_speculation.engine.lookup import LookupDrafter
from mlx_speculation.engine.mtp import MtpDraft, MtpDrafter
from mlx_speculation.engine.origins import Origin
from mlx_speculation.engine.responses import SpeculativeResponse
from mlx_speculation.engine.results import Chunk, Result
from mlx_speculation.engine.sequence import Sequence
from mlx_speculation.engine.statistics import DrafterFault, SourceCounts, Statistics
from mlx_speculation.engine.stream import Stream
from mlx_speculation.engine.vocabulary import reduced_vocabulary

__all__ = [
    "AssistantDraft",
    "AssistantDrafter",
    "BatchGenerator",
    "BatchResponse",
    "BatchStatistics",
    "Cascade",
    "Choose",
    "Chunk",
    "DFlashDraft",
    "Draft",
    "Drafter",
    "DrafterFault",
    "EagleDraft",
    "Lengths",
    "LookupDrafter",
    "MtpDraft",
    "MtpDrafter",
    "Origin",
    "Outcome",
    "Plan",
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
