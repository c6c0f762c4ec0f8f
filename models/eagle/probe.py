"""Probe of the layers that an EAGLE-3 head was trained to read.

The head's tensors fit any layers. The target writes a short text, and the head guesses
it from each list of layers that config.json may mean, see `checkpoints.layer_readings`.
"""

from collections.abc import Sequence

import mlx.nn as nn

from mlx_speculation.models.checkpoints.layer_readings import (
    LayerReadings,
    Layers,
    probed,
)
from mlx_speculation.models.checkpoints.probe import Score, whole_logits
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.eagle.config import AFTER_NORM
from mlx_speculation.models.eagle.head import Eagle, EagleHead
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.introspect.hidden_states import HiddenStates


def probe_layers(
    head: EagleHead,
    model: nn.Module,  # its target; the probe does not change it
    readings: LayerReadings,
    starts: Sequence[Sequence[int]],  # token ids of a few texts, at least two in each
) -> dict[Layers, Score]:
    """Find the layers that a head reads.

    Returns:
        The scores of the candidates, the chosen one first: the usual layers, unless
        others are surely better.

    Raises:
        ConventionError: the chosen candidate is not above chance.
    """
    trunk = len(find_parts(model).layers)
    layers = [each for each in readings.tapped(trunk) if each != AFTER_NORM]
    taps = HiddenStates(model, layers=layers, before_norm=True, after_norm=True)
    try:
        text = OwnText.of(model, taps, starts)
        advice = (
            "name the reading: EagleDraft.from_folder(folder, model, layer_ids='tuple')"
        )
        score = EagleProbe(head, model, taps, text).score
        return probed(score, readings, trunk, advice)
    finally:
        taps.remove()


class EagleProbe:
    """A head on a text of its target."""

    def __init__(
        self,
        head: EagleHead,
        model: nn.Module,  # the target
        taps: HiddenStates,  # on the target, at all layers that are tried
        text: OwnText,  # the text that the target wrote
    ) -> None:
        self._head, self._taps, self._text = head, taps, text
        with taps.collect() as self._states:
            model(text.tokens[:, :-1])

    def score(self, layers: Layers) -> Score:
        """Score the first drafts of rounds, with a round at each token of the text."""
        text, eagle = self._text, Eagle(self._head, self._taps, layers)
        first = max(text.written, 2)
        hidden = eagle.states(self._states)[:, :-1]
        caches = self._head.new_caches()[0]
        out = eagle.rows(hidden, text.tokens[:, 1:-1], caches)
        # Position i guesses the token at i + 2.
        width = text.target_log_probs.shape[-1]
        logits = whole_logits(out.logits[:, first - 2 :], self._head.ids, width)
        return text.score(logits, first)
