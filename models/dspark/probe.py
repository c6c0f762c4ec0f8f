"""How a DSpark drafter is read, told by what it guesses.

Two things no tensor shows, and some files leave open: what the list of layers counts,
and whether row j of a block is for its own position or for the one after it. The target
writes a little text, and the drafter guesses its tokens in each reading.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.errors import ModelFolderError
from mlx_speculation.models.checkpoints.draft_checkpoint import Config
from mlx_speculation.models.checkpoints.probe import Score, ranked
from mlx_speculation.models.checkpoints.probe_text import OwnText
from mlx_speculation.models.dflash import Anchor, DFlashHead
from mlx_speculation.models.dflash.config import tapped_layers
from mlx_speculation.models.dspark.config import NAME
from mlx_speculation.models.dspark.head import DSpark
from mlx_speculation.models.introspect.find_parts import find_parts
from mlx_speculation.models.introspect.hidden_states import HiddenStates


class Reading(NamedTuple):
    """How a drafter is read."""

    layers: tuple[int, ...]  # of the target, from 0; -1: the embeddings
    anchor: Anchor  # what row j of a block is for


def readings_of(
    config: Config,  # what config.json holds
    model: nn.Module,  # the target
    usual: Reading,
    *,
    other_layers: bool,  # whether the list of layers may count something else
    other_anchor: bool,  # whether row j may be for another position
) -> list[Reading]:
    """Return the readings to choose from, the usual one first.

    One that names layers which the target lacks is left out.
    """
    layers = [usual.layers]
    trunk = len(find_parts(model).layers)
    for reading in ("layers", "tuple") if other_layers else ():
        with suppress(ModelFolderError):
            found = tapped_layers(
                config, trunk, len(usual.layers), name=NAME, reading=reading
            )
            layers += [] if found in layers else [found]
    anchors: list[Anchor] = [usual.anchor]
    if other_anchor:
        anchors.append("given" if usual.anchor == "samples" else "samples")
    return [Reading(each, anchor) for each in layers for anchor in anchors]


def told(
    head: DFlashHead,
    model: nn.Module,  # its target, which is left as it was
    readings: Sequence[Reading],  # the usual one first
    starts: Sequence[Sequence[int]],  # token ids of a few texts
) -> Reading:
    """Return the reading in which a drafter guesses best.

    Raises:
        ConventionError: it guesses no better than by chance in any.
    """
    layers = sorted({index for each in readings for index in each.layers})
    taps = HiddenStates(model, layers=layers, before_norm=True, after_norm=True)
    try:
        text = OwnText.of(model, taps, starts)
        usual, *others = readings
        advice = (
            "name the reading: DSparkDraft.from_folder(folder, model, "
            f"layer_ids='tuple', anchor={usual.anchor!r})"
        )
        return next(
            iter(ranked(_Scorer(head, model, taps, text), usual, others, advice))
        )
    finally:
        taps.remove()


class _Scorer:
    """A drafter on a text of its target."""

    def __init__(
        self, head: DFlashHead, model: nn.Module, taps: HiddenStates, text: OwnText
    ) -> None:
        self._head, self._taps, self._text = head, taps, text
        with taps.collect() as self._states:
            model(text.tokens[:, :-1])

    def __call__(self, reading: Reading) -> Score:
        """Score the first draft behind every token that the target wrote."""
        head, text = self._head, self._text
        before, first = head.settings, max(text.own, 2)
        head.settings = replace(before, anchor=reading.anchor)
        try:
            drafter = DSpark(head, self._taps, reading.layers)
            context = drafter.states(self._states)
            rows = [
                self._first_draft(drafter, context[:, :newest], newest)
                for newest in range(first - 1, text.positions - 1)
            ]
        finally:
            head.settings = before
        return text.score(mx.concatenate(rows, axis=1), first)

    def _first_draft(self, drafter: DSpark, context: mx.array, newest: int) -> mx.array:
        """Return logits [rows, 1, vocab] of the token behind position `newest`."""
        tokens = self._text.tokens[:, newest : newest + 1]
        logits = drafter.first_logits(context, tokens)
        mx.eval(logits)
        return _whole(logits, self._head.ids, self._text.target_log_probs.shape[-1])


def _whole(logits: mx.array, ids: mx.array | None, width: int) -> mx.array:
    """Return logits [rows, n, vocab] of all ids; those not drafted get none."""
    if ids is None:
        return logits
    every = mx.full((*logits.shape[:2], width), -mx.inf, mx.float32)
    every[..., ids] = logits.astype(mx.float32)
    return every
