"""Probe of a block drafter: tries the readings of its checkpoint, and keeps the best.

No tensor shows which layers of the target the drafter reads, or whether row j of a
block predicts the token at its own position or at the next one. The target writes a
little text, and the probe scores the drafter's predictions under each reading.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.checkpoints.layer_readings import LayerReadings, Layers
from mlx_speculation.models.checkpoints.probe import Score, ranked
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.dflash.config import Anchor
from mlx_speculation.models.dflash.head import DFlash, DFlashHead
from mlx_speculation.models.introspect.hidden_states import HiddenStates


class Reading(NamedTuple):
    """One candidate of the probe."""

    layers: Layers
    anchor: Anchor


OnTarget = Callable[[DFlashHead, HiddenStates, Layers], DFlash]


def probe_blocks(
    head: DFlashHead,  # gets the anchor of the best reading
    on_target: OnTarget,
    model: nn.Module,
    readings: LayerReadings,
    starts: Sequence[Sequence[int]],  # token ids of a few texts to continue
    *,
    other_anchor: bool,  # whether to try the other anchor too
) -> tuple[Layers, Score]:
    """Return the layers of the reading with the best score, and the score.

    Raises:
        ConventionError: no candidate scores better than chance.
    """
    usual = head.settings
    anchors: list[Anchor] = [usual.anchor]
    if other_anchor:
        anchors.append("given" if usual.anchor == "samples" else "samples")
    every = [Reading(each, anchor) for each in readings.layers for anchor in anchors]
    taps = HiddenStates(model, layers=readings.tapped, after_norm=True)
    try:
        text = OwnText.of(model, taps, starts)

        def score(reading: Reading) -> Score:
            """Score the first drafted token at each position of the target's text."""
            head.settings = replace(usual, anchor=reading.anchor)
            drafter = on_target(head, taps, reading.layers)
            context, first = drafter.states(text.states), max(text.written, 2)
            rows = []
            for newest in range(first - 1, text.positions - 1):
                token = text.tokens[:, newest : newest + 1]
                rows.append(drafter.first_logits(context[:, :newest], token))
                mx.eval(rows)
            return text.score(mx.concatenate(rows, axis=1), first, head.ids)

        advice = (
            "add target_layer_ids to its config.json"
            if readings.guessed
            else "say how to read its config.json, such as from_folder(folder, model, "
            f"layer_ids='tuple', anchor={usual.anchor!r})"
        )
        best, value = next(iter(ranked(score, every[0], every, advice).items()))
        head.settings = replace(usual, anchor=best.anchor)
        return best.layers, value
    finally:
        taps.remove()
