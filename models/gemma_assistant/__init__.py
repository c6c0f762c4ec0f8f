"""Gemma 4 assistants: config.json, the module, loading, keys and values to read.

`engine.drafters` has the drafter that runs an assistant.
"""

from mlx_speculation.models.gemma_assistant.config import is_assistant
from mlx_speculation.models.gemma_assistant.network import (
    Assistant,
    AssistantOutput,
    Read,
    load_assistant,
)
from mlx_speculation.models.gemma_assistant.probe import (
    Anchor,
    position_of,
    probe_anchor,
    starts_for,
)
from mlx_speculation.models.gemma_assistant.shared_kv import SharedKv

__all__ = [
    "Anchor",
    "Assistant",
    "AssistantOutput",
    "Read",
    "SharedKv",
    "is_assistant",
    "load_assistant",
    "position_of",
    "probe_anchor",
    "starts_for",
]
