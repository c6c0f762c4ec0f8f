"""The drafter that is an EAGLE-3 head in a folder of its own.

It drafts as an MTP head does (see `engine/drafters/mtp.py`); what differs is the state
that each position begins with, which is made of three layers of the target, and that it
may know a part of the token ids only.
"""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.drafters.mtp import MtpDrafter
from mlx_speculation.engine.drafters.source import HeadSource
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import HiddenStates, Lane, find_parts, read_config
from mlx_speculation.models.eagle import (
    Eagle,
    EagleHead,
    LayerIds,
    is_eagle,
    layer_readings,
    load_eagle_head,
    probe_layers,
)
from mlx_speculation.models.gemma_assistant import starts_for
from mlx_speculation.models.mtp import MtpCache


class EagleDraft(HeadSource):
    """An EAGLE-3 head on its target, as the draft of a generator.

        model, tokenizer = load(folder)
        draft = EagleDraft.from_folder(head_folder, model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    Args:
        model: the target.
        head: its head.
        layers: of the target, from 0, whose outputs the head reads.

    Raises:
        UnsupportedModelError: the target does not show what the head reads.
    """

    kind = "eagle"
    head: EagleHead
    fits = staticmethod(is_eagle)

    def __init__(
        self, model: nn.Module, head: EagleHead, layers: tuple[int, ...]
    ) -> None:
        self.taps = HiddenStates(model, layers=layers)
        if "embed_tokens" not in head:
            self.taps.parts.require("embedding")
        self.model, self.head = model, head
        self.eagle = Eagle(head, self.taps, layers)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        model: nn.Module,
        *,
        layer_ids: LayerIds | None = None,
        tokenizer: Any = None,
    ) -> "EagleDraft":
        """Load a head; see `load_eagle_head`.

        Args:
            folder: the head's.
            model: the target.
            layer_ids: what the list of layers in config.json counts: "layers", or
                "tuple", in which 0 is the embedding. When omitted, the target writes
                about 64 tokens, and the head guesses them from either layers; those
                that the place of the list does not name are taken only if they are
                surely better. Without a tokenizer the place decides.
            tokenizer: the target's.

        Raises:
            ModelFolderError: the folder holds no such head, or not all of one.
            ConventionError: the head guesses no better than by chance.
        """
        head, layers = load_eagle_head(folder, model, layer_ids=layer_ids)
        if layer_ids is None and tokenizer is not None:
            config = read_config(Path(folder).expanduser())
            readings = layer_readings(config, len(find_parts(model).layers))
            scores = probe_layers(head, model, readings, starts_for(tokenizer))
            layers = readings[next(iter(scores))]
        return cls(model, head, layers)

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> MtpDrafter:
        """Return the drafter of one stream, which follows the target's lane."""
        return MtpDrafter(
            partial(MtpCache, self.eagle),
            sequence,
            self.following(lane, self.eagle.states),
            depth=self.eagle.head.depth,
            source="eagle",
            ids=self.eagle.head.ids,
        )
