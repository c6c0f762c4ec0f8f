"""Logit bias and the penalties for repeated tokens, for many rows at once.

The results equal those of mlx-lm's processors (row by row) to the last bit, in the
logits' own dtype. Windows of earlier tokens are made on the device, since the host does
not read drafted tokens.
"""

import mlx.core as mx

from mlx_speculation.samplers.row_context import KnownTokens, Rows, Windows
from mlx_speculation.samplers.sampling import Sampling


class Penalties:
    """The request's logit bias and penalties, in mlx-lm's order."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = some = sampling
        self._biases: dict[int, tuple[mx.array, mx.array]] = {}  # by logits' width
        kinds = some.repetition_penalty, some.presence_penalty, some.frequency_penalty
        self.active = bool(some.biases) or any(kinds)

    def apply(
        self, logits: mx.array, rows: Rows, known: KnownTokens | None = None
    ) -> mx.array:
        """Return the logits [rows, vocab] with bias and penalties, in their dtype.

        Ids >= `vocab` are ignored. `known` makes windows over a whole text cheap.
        """
        options = self._sampling
        if options.biases:
            logits = self._biased(logits)
        kinds = (
            (repetition, options.repetition_penalty, options.repetition_context_size),
            (presence, options.presence_penalty, options.presence_context_size),
            (frequency, options.frequency_penalty, options.frequency_context_size),
        )
        windows: dict[int, Windows] = {}  # by size; usually the three sizes are equal
        for penalize, penalty, size in kinds:
            if penalty:
                windows[size] = windows.get(size) or rows.windows(size, known)
                logits = penalize(logits, windows[size], penalty)
        return logits

    def _biased(self, logits: mx.array) -> mx.array:
        width = logits.shape[-1]
        if width not in self._biases:
            kept = [(i, value) for i, value in self._sampling.biases if i < width]
            ids = mx.array([i for i, _ in kept], dtype=mx.uint32)
            values = mx.array([value for _, value in kept], dtype=mx.float32)
            self._biases[width] = ids, values
        ids, values = self._biases[width]
        return logits.at[..., ids].add(values) if ids.size else logits


def repetition(logits: mx.array, windows: Windows, penalty: float) -> mx.array:
    """Multiply negative logits of earlier tokens by the penalty; divide positive ones.

    Keskar et al., "CTRL" (2019), section 4.1, but sign-dependent as in mlx-lm.
    """
    tokens, result = _own(windows, logits.shape[-1])
    chosen = mx.take_along_axis(logits, tokens, axis=-1)
    changed = mx.where(chosen < 0, chosen * penalty, chosen / penalty)
    changed = mx.where(result, changed, chosen)
    return mx.put_along_axis(logits, tokens, changed, axis=-1)


def presence(logits: mx.array, windows: Windows, penalty: float) -> mx.array:
    """Subtract the penalty once from the logit of each earlier token."""
    tokens, result = _own(windows, logits.shape[-1])
    chosen = mx.take_along_axis(logits, tokens, axis=-1)
    changed = mx.where(result, chosen - penalty, chosen)
    return mx.put_along_axis(logits, tokens, changed, axis=-1)


def frequency(logits: mx.array, windows: Windows, penalty: float) -> mx.array:
    """Subtract the penalty from a token's logit once per occurrence."""
    width = logits.shape[-1]
    tokens, valid = windows.tokens, windows.valid & (windows.tokens < width)
    amounts = mx.where(valid, mx.array(penalty, logits.dtype), 0)
    rows = mx.arange(len(logits), dtype=mx.uint32)[:, None]
    # Subtracting n times the penalty at once would round differently.
    return logits.at[rows, mx.where(valid, tokens, 0)].subtract(amounts)


def _own(windows: Windows, width: int) -> tuple[mx.array, mx.array]:
    """Return the window's ids below `width`, and whether a row has any."""
    valid = windows.valid & (windows.tokens < width)
    some = mx.argmax(valid, axis=-1, keepdims=True)
    result = mx.take_along_axis(valid, some, axis=-1)
    other = mx.take_along_axis(windows.tokens, some, axis=-1)
    # Invalid entries repeat a valid token, so that all writes to an id are equal.
    tokens = mx.where(valid, windows.tokens, mx.where(result, other, 0))
    return tokens, result
