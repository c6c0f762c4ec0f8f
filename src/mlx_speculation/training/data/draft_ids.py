"""The token ids of a draft: those that the target writes most often."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_speculation.training.data.answers import end_ids
from mlx_speculation.training.data.dialogues import Dialogue

_MOST_SPECIAL = 256


def choose_ids(
    dialogues: Sequence[Dialogue], size: int, width: int, always: Sequence[int]
) -> NDArray[np.int64]:
    """Return the `size` most frequent ids among tokens to learn, in ascending order.

    Ids in `always` are preferred, whatever their frequency. The target has `width` ids.
    """
    counts = np.zeros(width, np.int64)
    for each in dialogues:
        counts += np.bincount(each.tokens[each.counts], minlength=width)
    counts[[token for token in always if token < width]] += counts.sum() + 1
    # Ids that do not occur fill the remaining places, the lowest first.
    order = np.lexsort((np.arange(width), -counts))
    return np.sort(order[: min(size, width)]).astype(np.int64)


def needed_ids(tokenizer: Any) -> list[int]:
    """Return ids that every draft needs: ends, white space, digits, special tokens."""
    result = end_ids(tokenizer)
    for text in ("\n", "\n\n", " ", *"0123456789"):
        result += tokenizer.encode(text, add_special_tokens=False)[:1]
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}))
    return [*result, *added[:_MOST_SPECIAL]]


def coverage(dialogues: Sequence[Dialogue], ids: NDArray[np.int64]) -> float:
    """Return the share of tokens to learn that are among the ids."""
    tokens = np.concatenate([each.tokens[each.counts] for each in dialogues])
    return float(np.isin(tokens, ids).mean()) if tokens.size else 0.0
