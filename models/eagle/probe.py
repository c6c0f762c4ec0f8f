"""Probe of the layers that an EAGLE-3 head was trained to read.

The target writes a short text, and the head guesses it from each list of layers that
config.json can mean.
"""

from collections.abc import Sequence

import mlx.nn as nn

from mlx_speculation.models.checkpoints.layer_readings import LayerReadings, Layers
from mlx_speculation.models.checkpoints.probe import Score, ranked
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.eagle.config import AFTER_NORM
from mlx_speculation.models.eagle.head import Eagle, EagleHead
from mlx_speculation.models.introspect.hidden_states import HiddenStates


def probe_layers(
    head: EagleHead,
    model: nn.Module,
    readings: LayerReadings,
    starts: Sequence[Sequence[int]],  # token ids of a few texts, at least two in each
) -> dict[Layers, Score]:
    """Return the scores of lists of layers to read, the chosen one first.

    The usual layers are chosen, unless others are surely better.

    Raises:
        ConventionError: the chosen candidate is not above chance.
    """
    layers = [each for each in readings.tapped if each != AFTER_NORM]
    taps = HiddenStates(model, layers=layers, after_norm=True)
    try:
        text = OwnText.of(model, taps, starts)

        def score(layers: Layers) -> Score:
            """Score one drafted token for each position i: the guess of token i + 2."""
            eagle, first = Eagle(head, taps, layers), max(text.written, 2)
            hidden, caches = eagle.states(text.states)[:, :-1], head.new_caches()[0]
            logits = eagle.rows(hidden, text.tokens[:, 1:-1], caches).logits
            return text.score(logits[:, first - 2 :], first, head.ids)

        advice = (
            "add target_layer_ids to its config.json"
            if readings.guessed
            else "say how its config.json counts layers, such as "
            "EagleDraft.from_folder(folder, model, layer_ids='tuple')"
        )
        return ranked(
            score, readings.usual, readings.layers, advice, readings.layers.__getitem__
        )
    finally:
        taps.remove()
