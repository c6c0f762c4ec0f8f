"""Probe of the position that an assistant's queries were trained at.

The queries are rotated for one position of the target's text. No tensor shows this
position. The target writes a short text, and the assistant guesses it with each choice:

    "state"    the position of the target's state, the last one whose keys are seen
    "token"    the position of the newest token, one later
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
    """Return the score of each anchor of an assistant, the chosen one first.

    The usual one is chosen, unless the other is surely better. `starts` are token ids
    of a few texts, at least two in each.

    Raises:
        ConventionError: the chosen anchor is not above chance.
    """
    taps = HiddenStates(model, after_norm=True)
    try:
        text, shared = OwnText.of(model, taps, starts), SharedKv(model, assistant)
        embedded, states = taps.embed(text.tokens, scaled=True), text.states.after_norm
        caches: Any = make_prompt_cache(model)
        model(text.tokens[:, :-1], cache=caches)
        first, vocab = max(text.written, 2), text.target_log_probs.shape[-1]

        def score(anchor: Anchor) -> Score:
            """Draft a token at each position of the target's text, and score them."""
            drafted = []
            for known in range(first - 1, text.positions - 1):
                read, _ = shared.read(caches, text.positions - 1 - known)
                hidden = assistant.run(
                    embedded[:, known : known + 1],
                    states[:, known - 1 : known],
                    read,
                    position_of(anchor, known),
                )
                rows = [_whole(*assistant.logits(row), vocab) for row in hidden]
                drafted.append(mx.stack(rows))
                mx.async_eval(drafted[-1])
            return text.score(mx.concatenate(drafted, axis=1), first)

        advice = (
            "name the anchor: AssistantDraft.from_folder(folder, model, "
            f"anchor={USUAL!r})"
        )
        return ranked(score, USUAL, get_args(Anchor), advice)
    finally:
        taps.remove()


def _whole(logits: mx.array, ids: mx.array | None, vocab: int) -> mx.array:
    """Return logits [1, vocab]; ids without a score get the lowest logit minus 1."""
    if ids is None:
        return logits[:, :vocab]
    least = logits.min(axis=-1, keepdims=True) - 1
    every = mx.repeat(least, vocab + 1, axis=-1)
    every[:, mx.minimum(ids[0], vocab)] = logits
    return every[:, :vocab]
