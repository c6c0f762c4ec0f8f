"""Probe of a block drafter: tries readings of its checkpoint, and keeps the best one.

Some checkpoints do not say two things, and no tensor shows them: which layers of the
target the drafter reads (see `checkpoints.layer_readings`), and whether row j of a
block predicts the token at its own position or at the one after it. The probe lets the
target write a little text, and scores the drafter's predictions in each reading.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.checkpoints.layer_readings import (
    LayerReadings,
    Layers,
    search,
)
from mlx_speculation.models.checkpoints.probe import (
    Score,
    Trials,
    ranked,
    whole_logits,
)
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.dflash.config import Anchor
from mlx_speculation.models.dflash.head import DFlash, DFlashHead
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.introspect.hidden_states import HiddenStates


class Reading(NamedTuple):
    """One candidate of the probe."""

    layers: Layers  # the layers of the target to read, from 0; -1: the embeddings
    anchor: Anchor  # the position that row j of a block predicts


# Makes a drafter on its target, which reads these layers
OnTarget = Callable[[DFlashHead, HiddenStates, Layers], DFlash]


def probe_blocks(
    head: DFlashHead,
    on_target: OnTarget,
    model: nn.Module,  # the target; the probe does not change it
    readings: LayerReadings,
    starts: Sequence[Sequence[int]],  # token ids of a few texts to continue
    *,
    other_anchor: bool,  # whether to try the other anchor too
) -> tuple[Reading, Score]:
    """Return the reading with the best score, and the score.

    Raises:
        ConventionError: no reading scores better than chance.
    """
    trunk, usual = len(find_parts(model).layers), head.settings.anchor
    anchors: list[Anchor] = [usual]
    if other_anchor:
        anchors.append("given" if usual == "samples" else "samples")
    every = [Reading(each, anchor) for each in readings.layers for anchor in anchors]
    layers = readings.tapped(trunk)
    taps = HiddenStates(model, layers=layers, before_norm=True, after_norm=True)
    try:
        text = OwnText.of(model, taps, starts)
        trials = Trials(_Scorer(head, on_target, model, taps, text))
        first, *others = every
        if readings.guessed:
            begin = trials.best(first, others)

            def score(layers: Layers) -> Score:
                return trials.score(Reading(layers, begin.anchor))

            moved = search(score, begin.layers, trunk)
            others.append(Reading(moved, begin.anchor))
        advice = (
            "add target_layer_ids to its config.json"
            if readings.guessed
            else "name the reading: from_folder(folder, model, layer_ids='tuple', "
            f"anchor={usual!r})"
        )
        return next(iter(ranked(trials.score, first, others, advice).items()))
    finally:
        taps.remove()


class _Scorer:
    """Scores readings of a drafter on a text that its target wrote."""

    def __init__(
        self,
        head: DFlashHead,
        on_target: OnTarget,
        model: nn.Module,
        taps: HiddenStates,
        text: OwnText,
    ) -> None:
        self._head, self._taps, self._text = head, taps, text
        self._on_target = on_target
        with taps.collect() as self._states:
            model(text.tokens[:, :-1])

    def __call__(self, reading: Reading) -> Score:
        """Score the first drafted token after each token that the target wrote."""
        head, text = self._head, self._text
        before, first = head.settings, max(text.written, 2)
        head.settings = replace(before, anchor=reading.anchor)
        try:
            drafter = self._on_target(head, self._taps, reading.layers)
            context = drafter.states(self._states)
            rows = [
                self._first_draft(drafter, context[:, :newest], newest)
                for newest in range(first - 1, text.positions - 1)
            ]
        finally:
            head.settings = before
        return text.score(mx.concatenate(rows, axis=1), first)

    def _first_draft(self, drafter: DFlash, context: mx.array, newest: int) -> mx.array:
        """Return logits [rows, 1, vocab] of the token after position `newest`."""
        tokens, width = self._text.tokens, self._text.target_log_probs.shape[-1]
        logits = drafter.first_logits(context, tokens[:, newest : newest + 1])
        mx.eval(logits)
        return whole_logits(logits, self._head.ids, width)
