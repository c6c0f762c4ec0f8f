"""Output of a drafter, and the map from its vocabulary to that of the target."""

from collections.abc import Sequence

import numpy as np

from support.references.blocks.primitives import Array, Weights


def target_ids(weights: Weights, count: int) -> Array:
    """The target's ids of the draft's ids i < count: i + d2t[i], or i without d2t."""
    d2t = weights.get("d2t")
    if d2t is None:
        return np.arange(count)
    return np.arange(count) + d2t.astype(np.int64)


def to_target(logits: Array, ids: Array, vocabulary: int) -> Array:
    """Logits [.., draft ids], moved to the target's `ids`: [.., V], -inf elsewhere."""
    full = np.full((*logits.shape[:-1], vocabulary), -np.inf)
    full[..., ids] = logits
    return full


def predecessor_choice(logits: Array, chosen: Sequence[int] | None, step: int) -> int:
    """The id drafted at a step: the given id, or else the most likely one."""
    if chosen is not None and step < len(chosen):
        return int(chosen[step])
    return int(np.argmax(logits))
