"""The table of learned positions that a model may have, such as GPT-2's.

A forward past its last row reads memory that is not the table's: mlx does not check
indices. The table is found by feeding two tokens of id 0: it is the embedding that is
asked for rows 0 and 1.
"""

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.introspect.trace import POSITIONS, trace

_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


def position_table(model: nn.Module) -> int | None:
    """Return how many positions a model has learned rows for; None: it has no table."""
    modules = [m for _, m in model.named_modules() if isinstance(m, _EMBEDDINGS)]
    if len(modules) < 2:  # the one of token ids
        return None
    rows = [
        call.module["weight"].shape[0]
        for call in trace(model).of(modules)
        if call.method == "__call__" and _asks_for_positions(call.values[0])
    ]
    return min(rows, default=None)


def _asks_for_positions(indices: object) -> bool:
    """Return whether indices are 0 and 1."""
    if not isinstance(indices, mx.array) or indices.size != POSITIONS:
        return False
    return bool(indices.reshape(-1).tolist() == list(range(POSITIONS)))
