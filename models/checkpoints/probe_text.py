"""A short text that a target writes or reads, with the states that drafters read.

The target writes greedily from a few neutral starts in one batch, with new caches. A
passage is read in one forward: its later places have a long context, in which errors of
attention show.
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
# Everyday prose and code; tokenizers make about 200 to 300 tokens of it.
PASSAGE = '''\
The garden behind the old house had not been touched for years. Tall grass grew between
the stones of the path, and the gate no longer closed. Anna pushed it open and walked
slowly towards the pond. "Nobody has been here since the summer," she said, "and nobody
will mind if we stay until the evening." Her brother put the basket on the bench, looked
at the sky, and counted the clouds above the roof of the old house.

def read_lines(path, limit=100):
    """Return the first lines of a file, without the ends of line."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number >= limit:
                break
            lines.append(line.rstrip())
    return lines
'''
LONGEST_PASSAGE = 256
# 4 starts x 16 = 64 tokens; repeated ones do not count, see `OwnText.score`.
STEPS = 16


@dataclass(frozen=True, slots=True, eq=False)
class OwnText:
    """A text in rows of one length."""

    tokens: mx.array  # ids [rows, positions]
    written: int  # the first position that the target wrote; 1 for a passage
    # The target's log-probabilities from position `written` on, float32
    # [rows, positions - written, vocab]
    target_log_probs: mx.array
    # The target's states at all positions but the last, [rows, positions - 1, dim]
    after_norm: mx.array
    before_norm: mx.array

    @classmethod
    def of(
        cls,
        model: nn.Module,  # the target
        taps: HiddenStates,  # on the target, before and after its norm
        # Token ids; all are cut to the length of the shortest
        starts: Sequence[Sequence[int]],
        steps: int = STEPS,  # how many tokens to write in each row
    ) -> "OwnText":
        """Let a target write a text."""
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
        text = cls(
            mx.concatenate(tokens, axis=1),
            shortest,
            mx.concatenate(target_log_probs, axis=1),
            seen.after_norm,
            seen.before_norm,
        )
        mx.eval(text.tokens, text.target_log_probs, text.after_norm, text.before_norm)
        return text

    @classmethod
    def read(
        cls,
        model: nn.Module,  # the target
        taps: HiddenStates,  # on the target, before and after its norm
        tokens: Sequence[int],  # token ids of the passage
    ) -> "OwnText":
        """Let a target read a passage; guesses are compared with its predictions."""
        target: Any = model
        row = mx.array([list(tokens)[:LONGEST_PASSAGE]], mx.uint32)
        seen = taps.states()
        with taps.collect(seen):
            logits = target(row[:, :-1], cache=make_prompt_cache(model))
        text = cls(row, 1, log_probs(logits), seen.after_norm, seen.before_norm)
        mx.eval(text.target_log_probs, text.after_norm, text.before_norm)
        return text

    @property
    def positions(self) -> int:
        """Number of tokens in a row."""
        return self.tokens.shape[1]

    def score(self, logits: mx.array, first: int) -> Score:
        """Score guesses; a repeated trigram of the text counts once.

        Args:
            logits: [rows, n, vocab], for the tokens at positions first, first + 1, ...
            first: the first position, `written` or later.
        """
        stop = first + logits.shape[1]
        rows, columns = self._places(first, stop)
        at = mx.array(columns)
        target_log_probs = self.target_log_probs[mx.array(rows), at - self.written]
        return Score.of(
            logits[mx.array(rows), at - first],
            target_log_probs,
            mx.argmax(target_log_probs, axis=-1),
        )

    def _places(self, first: int, stop: int) -> tuple[list[int], list[int]]:
        """Return rows and positions of tokens, each trigram's first occurrence only."""
        ids: list[list[int]] = np.array(self.tokens).tolist()
        result: dict[tuple[int, ...], tuple[int, int]] = {}
        for row, line in enumerate(ids):
            for column in range(first, stop):
                result.setdefault(
                    tuple(line[max(0, column - 2) : column + 1]), (row, column)
                )
        return [row for row, _ in result.values()], [col for _, col in result.values()]
