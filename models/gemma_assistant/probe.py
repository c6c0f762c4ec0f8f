"""Probe of the position that an assistant's queries were trained at.

The queries are rotated for one position of the target's text, and the keys for their
own, so the choice matters, and no tensor shows it. The target writes a short text, and
the assistant guesses it with each choice:

    "state"    the position of the target's state, the last one whose keys are seen
    "token"    the position of the newest token, one further
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_speculation.models.checkpoints.probe import Score, ranked
from mlx_speculation.models.checkpoints.probe_text import STARTS, OwnText
from mlx_speculation.models.gemma_assistant.network import Assistant
from mlx_speculation.models.gemma_assistant.shared_kv import SharedKv
from mlx_speculation.models.introspect.hidden_states import HiddenStates

Anchor = Literal["state", "token"]
USUAL: Anchor = "state"


def position_of(anchor: Anchor, known: int) -> int:
    """Return the queries' position if keys of positions 0 to `known` - 1 are seen."""
    return known - 1 if anchor == "state" else known


def starts_for(tokenizer: Any) -> list[list[int]]:
    """Return token ids of the beginnings that a target continues."""
    return [list(tokenizer.encode(text)) for text in STARTS]


def probe_anchor(
    assistant: Assistant, model: nn.Module, starts: Sequence[Sequence[int]]
) -> dict[Anchor, Score]:
    """Find the position of an assistant's queries.

    Args:
        assistant: the assistant.
        model: its target; the probe does not change it.
        starts: token ids of a few texts, at least two in each.

    Returns:
        The score of each anchor, the chosen one first: the usual anchor, unless the
        other is surely better.

    Raises:
        ConventionError: the chosen anchor is not above chance.
    """
    taps = HiddenStates(model, before_norm=True, after_norm=True)
    try:
        trial = AssistantProbe(assistant, model, taps, OwnText.of(model, taps, starts))
        others = [anchor for anchor in get_args(Anchor) if anchor != USUAL]
        advice = (
            "name the anchor: AssistantDraft.from_folder(folder, model, "
            f"anchor={USUAL!r})"
        )
        return ranked(trial.score, USUAL, others, advice)
    finally:
        taps.remove()


class AssistantProbe:
    """An assistant on a text that its target wrote."""

    def __init__(
        self,
        assistant: Assistant,
        model: nn.Module,
        taps: HiddenStates,
        text: OwnText,
    ) -> None:
        self._assistant, self._text = assistant, text
        self._shared = SharedKv(model, assistant)
        self._embedded = taps.embed(text.tokens, scaled=True)
        self._caches: Any = make_prompt_cache(model)
        model(text.tokens[:, :-1], cache=self._caches)

    def score(self, anchor: Anchor) -> Score:
        """Score the first drafts of rounds, with a round at each token of the text."""
        first = max(self._text.written, 2)
        places = range(first, self._text.positions)
        drafted = [self._rows_at(place, anchor) for place in places]
        return self._text.score(mx.concatenate(drafted, axis=1), first)

    def _rows_at(self, place: int, anchor: Anchor) -> mx.array:
        """Return logits [rows, 1, vocab] for a place, from the text before it."""
        known = place - 1  # positions before the newest token's
        left_out = self._text.positions - 1 - known
        read, _ = self._shared.read(self._caches, left_out)
        hidden = self._assistant.run(
            self._embedded[:, known : known + 1],
            self._text.after_norm[:, known - 1 : known],
            read,
            position_of(anchor, known),
        )
        vocab = self._text.target_log_probs.shape[-1]
        rows = [_whole(*self._assistant.logits(row), vocab) for row in hidden]
        drafted = mx.stack(rows)
        mx.async_eval(drafted)
        return drafted


def _whole(logits: mx.array, ids: mx.array | None, vocab: int) -> mx.array:
    """Return logits [1, vocab] of all ids; ids that were not scored get least - 1.

    Centroid heads with dense logits do the same.
    """
    if ids is None:
        return logits[:, :vocab]
    least = logits.min(axis=-1, keepdims=True) - 1
    every = mx.repeat(least, vocab + 1, axis=-1)
    every[:, mx.minimum(ids[0], vocab)] = logits
    return every[:, :vocab]
