"""Which layers an EAGLE-3 head was trained to read, told by what it guesses.

The list in config.json is read in two ways (see `config`), and the tensors fit
both. The target writes a little text, and the head guesses it from either layers.
"""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.models.checkpoints.probe import Score, ranked
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.eagle.config import AFTER_NORM, LayerIds
from mlx_speculation.models.eagle.head import Eagle, EagleHead
from mlx_speculation.models.introspect.hidden_states import HiddenStates


def probe_layers(
    head: EagleHead,
    model: nn.Module,  # its target, which is left as it was
    # The layers of each reading, the usual one first
    readings: Mapping[LayerIds, tuple[int, ...]],
    starts: Sequence[Sequence[int]],  # token ids of a few texts, two at least in each
) -> dict[LayerIds, Score]:
    """Find the layers that a head reads.

    Returns:
        The score of each reading, the best first; the usual one is, unless another is
        surely better.

    Raises:
        ConventionError: none is above chance.
    """
    named = {index for each in readings.values() for index in each}
    layers = sorted(named - {AFTER_NORM})
    taps = HiddenStates(model, layers=layers, before_norm=True, after_norm=True)
    try:
        text = OwnText.of(model, taps, starts)
        usual, *others = readings
        advice = (
            "name the reading: EagleDraft.from_folder(folder, model, "
            f"layer_ids={usual!r})"
        )
        score = EagleProbe(head, model, taps, text, readings).score

        def shown(reading: LayerIds) -> str:
            layers = readings[reading]
            after = layers == (AFTER_NORM,)
            return f"{reading!r} {'after the norm' if after else list(layers)}"

        return ranked(score, usual, others, advice, shown)
    finally:
        taps.remove()


class EagleProbe:
    """A head on a text of its target."""

    def __init__(
        self,
        head: EagleHead,
        model: nn.Module,  # the target
        taps: HiddenStates,  # on it, at all layers of the readings
        text: OwnText,  # what it wrote
        readings: Mapping[LayerIds, tuple[int, ...]],  # the layers of each reading
    ) -> None:
        self._head, self._taps, self._text = head, taps, text
        self._readings = readings
        with taps.collect() as self._states:
            model(text.tokens[:, :-1])

    def score(self, reading: LayerIds) -> Score:
        """Score the first drafts, as rounds that begin at every token make them."""
        text, eagle = self._text, Eagle(self._head, self._taps, self._readings[reading])
        first = max(text.own, 2)
        hidden = eagle.states(self._states)[:, :-1]
        caches = self._head.new_caches()[0]
        out = eagle.rows(hidden, text.tokens[:, 1:-1], caches)
        # Position i guesses the token at i + 2.
        return text.score(self._whole(out.logits[:, first - 2 :]), first)

    def _whole(self, logits: mx.array) -> mx.array:
        """Return logits [rows, n, vocab] of all ids; those not drafted get none."""
        ids = self._head.ids
        if ids is None:
            return logits
        shape = (*logits.shape[:2], self._text.target_log_probs.shape[-1])
        every = mx.full(shape, -mx.inf, mx.float32)
        every[..., ids] = logits.astype(mx.float32)
        return every
