"""A short text that a target writes greedily, with the states that drafters read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.models.checkpoints.probe import Score, log_probs
from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.taps import States

# Code and prose, so that the target knows at least one of these kinds of text.
STARTS = (
    "The first of these",
    "import os, sys\n\n\ndef",
    "A list of the most",
    "Once upon a time there",
)
# 4 starts x 16 = 64 tokens; repeated trigrams are scored once, see `OwnText.score`.
STEPS = 16


@dataclass(frozen=True, slots=True, eq=False)
class OwnText:
    """A text in rows of equal length."""

    tokens: mx.array  # ids [rows, positions]
    written: int  # the first position that the target wrote
    # The target's log-probabilities from position `written` on, float32
    # [rows, positions - written, vocab]
    target_log_probs: mx.array
    states: States  # the target's at all positions but the last

    @classmethod
    def of(
        cls,
        model: nn.Module,
        taps: HiddenStates,  # on the target; they collect `states`
        starts: Sequence[Sequence[int]],  # ids; cut to the length of the shortest
        steps: int = STEPS,  # how many tokens to write in each row
    ) -> "OwnText":
        """Let a target write a text with new caches, all rows in one batch."""
        shortest = min(len(start) for start in starts)
        rows = mx.array([list(start[:shortest]) for start in starts], mx.uint32)
        target: Any = model
        caches, seen = make_prompt_cache(model), taps.states()
        tokens, target_log_probs = [rows], []
        for _ in range(steps):
            with taps.collect(seen):
                logits = target(tokens[-1], cache=caches)
            target_log_probs.append(log_probs(logits[:, -1:]))
            tokens.append(mx.argmax(logits[:, -1:], axis=-1).astype(mx.uint32))
            mx.async_eval(tokens[-1])
        whole = [mx.concatenate(each, axis=1) for each in (tokens, target_log_probs)]
        mx.eval(whole, seen.arrays)
        return cls(whole[0], shortest, whole[1], seen)

    @property
    def positions(self) -> int:
        """Number of tokens in a row."""
        return self.tokens.shape[1]

    def score(self, logits: mx.array, first: int, ids: mx.array | None = None) -> Score:
        """Score guesses; a repeated trigram of the text is scored once.

        `logits`, [rows, n, columns], are for the tokens at the n positions from
        `first`, which is `written` or later. `ids` are the token ids of the columns;
        None: all, in order.
        """
        stop = first + logits.shape[1]
        rows, columns = self._places(first, stop)
        at = mx.array(columns)
        target_log_probs = self.target_log_probs[mx.array(rows), at - self.written]
        drafted = logits[mx.array(rows), at - first]
        if ids is not None:
            every = mx.full(target_log_probs.shape, -mx.inf)
            every[:, ids] = drafted.astype(mx.float32)
            drafted = every
        written = mx.argmax(target_log_probs, axis=-1)
        return Score.of(drafted, target_log_probs, written)

    def _places(self, first: int, stop: int) -> tuple[list[int], list[int]]:
        """Return rows and positions of tokens that end a trigram for the first time."""
        ids: list[list[int]] = np.array(self.tokens).tolist()
        result: dict[tuple[int, ...], tuple[int, int]] = {}
        for row, line in enumerate(ids):
            for column in range(first, stop):
                result.setdefault(
                    tuple(line[max(0, column - 2) : column + 1]), (row, column)
                )
        return [row for row, _ in result.values()], [col for _, col in result.values()]
