"""The engine: rounds, drafters, streams and the generator.

It knows models, caches and samplers through their own words. Nothing but the front
door and the scripts imports it.
"""

from mlx_speculation.engine.drafting import Draft, Drafter
from mlx_speculation.engine.generator import SpeculativeGenerator
from mlx_speculation.engine.results import Chunk, Result
from mlx_speculation.engine.statistics import Statistics
from mlx_speculation.engine.stream import Stream

__all__ = [
    "Chunk",
    "Draft",
    "Drafter",
    "Result",
    "SpeculativeGenerator",
    "Statistics",
    "Stream",
]
