"""A little text that a target writes itself, with what drafters would have seen.

It is written greedily from a few neutral starts at once, into caches of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.models.checkpoints.probe import Score, log_probs
from mlx_speculation.models.introspect.hidden_states import HiddenStates

# Code and prose; some of it should be of a kind that the target has seen.
STARTS = (
    "The first of these",
    "import os, sys\n\n\ndef",
    "A list of the most",
    "Once upon a time there",
)
# 4 starts x 16: 64 tokens, of which those count that do not repeat.
STEPS = 16


@dataclass(frozen=True, slots=True, eq=False)
class OwnText:
    """A text in rows of one length."""

    tokens: mx.array  # ids [rows, positions]
    own: int  # the first position that the target wrote
    # Its log-probabilities there, float32 [rows, positions - own, vocab]
    target_log_probs: mx.array
    # Its states at all positions but the last, [rows, positions - 1, dim]
    after_norm: mx.array
    before_norm: mx.array  # likewise

    @classmethod
    def of(
        cls,
        model: nn.Module,  # the target; caches are made for it here, and dropped
        taps: HiddenStates,  # on it, before and after its norm
        # Token ids; all are cut to the length of the shortest
        starts: Sequence[Sequence[int]],
        steps: int = STEPS,  # how many tokens to write in each row
    ) -> "OwnText":
        """Let a target write."""
        own = min(len(start) for start in starts)
        rows = mx.array([list(start[:own]) for start in starts], mx.uint32)
        target: Any = model
        caches, seen = make_prompt_cache(model), taps.states()
        tokens, target_log_probs = [rows], []
        for _ in range(steps):
            with taps.collect(seen):
                logits = target(tokens[-1], cache=caches)
            target_log_probs.append(log_probs(logits[:, -1:]))
            tokens.append(mx.argmax(logits[:, -1:], axis=-1).astype(mx.uint32))
            mx.async_eval(tokens[-1])
        text = cls(
            mx.concatenate(tokens, axis=1),
            own,
            mx.concatenate(target_log_probs, axis=1),
            seen.after_norm,
            seen.before_norm,
        )
        mx.eval(text.tokens, text.target_log_probs, text.after_norm, text.before_norm)
        return text

    @property
    def positions(self) -> int:
        """How many tokens there are in a row."""
        return self.tokens.shape[1]

    def score(self, logits: mx.array, first: int) -> Score:
        """Score guesses; what a text says twice counts once.

        Args:
            logits: [rows, n, vocab], for the tokens at positions first, first + 1, ...
            first: `own` or later.
        """
        stop = first + logits.shape[1]
        rows, columns = self._places(first, stop)
        at = mx.array(columns)
        target_log_probs = self.target_log_probs[mx.array(rows), at - self.own]
        return Score.of(
            logits[mx.array(rows), at - first],
            target_log_probs,
            self.tokens[mx.array(rows), at],
        )

    def _places(self, first: int, stop: int) -> tuple[list[int], list[int]]:
        """Return rows and positions of tokens that do not follow the same two again."""
        ids: list[list[int]] = np.array(self.tokens).tolist()
        found: dict[tuple[int, ...], tuple[int, int]] = {}
        for row, line in enumerate(ids):
            for column in range(first, stop):
                found.setdefault(
                    tuple(line[max(0, column - 2) : column + 1]), (row, column)
                )
        return [row for row, _ in found.values()], [col for _, col in found.values()]
