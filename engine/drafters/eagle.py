"""Drafters with EAGLE-3 or P-EAGLE heads from folders of their own.

Such a head drafts like an MTP head (see `engine/drafters/mtp.py`), with two
differences: the head's input state is made of the outputs of three layers of the
target, and its vocabulary may be only a part of the token ids.
"""

from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn

from mlx_speculation.engine.drafters.draft import HeadDraft
from mlx_speculation.engine.drafters.mtp import MtpDrafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import HiddenStates, Lane
from mlx_speculation.models.checkpoints import LayerIds
from mlx_speculation.models.eagle import (
    AFTER_NORM,
    Eagle,
    EagleHead,
    PEagle,
    PEagleHead,
    is_eagle,
    is_peagle,
    load_eagle_head,
)
from mlx_speculation.models.gemma_assistant import starts_for
from mlx_speculation.models.mtp import HeadCache, MtpCache


class EagleDraft(HeadDraft):
    """An EAGLE-3 head on its target, as the draft of a generator.

        model, tokenizer = load(folder)
        draft = EagleDraft.from_folder(head_folder, model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    Args:
        model: the target.
        head: the head, trained for this target.
        layers: indices, from 0, of the target's layers whose outputs the head reads;
            -1: the embeddings; -2: the output of the final norm.

    Raises:
        UnsupportedModelError: the target's structure gives no access to these outputs.
    """

    kind: Literal["eagle", "peagle"] = "eagle"
    head: EagleHead
    fits = staticmethod(is_eagle)

    def __init__(
        self, model: nn.Module, head: EagleHead, layers: tuple[int, ...]
    ) -> None:
        taken = [index for index in layers if index != AFTER_NORM]
        self.taps = HiddenStates(model, layers=taken, after_norm=AFTER_NORM in layers)
        if "embed_tokens" not in head:
            self.taps.parts.require("embedding")
        self.model, self.head = model, head
        self.eagle = self._on_target(layers)

    def _on_target(self, layers: tuple[int, ...]) -> Eagle:
        return Eagle(self.head, self.taps, layers)

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
            folder: the head's folder.
            model: the target.
            layer_ids: how the list of layers in config.json counts: "layers" (0 is the
                first layer) or "tuple" (0 is the embedding). None: the target generates
                about 64 tokens, and the head predicts them with both ways to count. If
                there is no list, the head predicts with a few sets of layers instead,
                and the draft's `notice` says which set it reads. The usual way or set
                is taken unless another is surely better.
            tokenizer: the target's. If it is None, nothing is generated: without
                `layer_ids`, the usual way or set is taken.

        Raises:
            ModelFolderError: the folder holds no such head, or only a part of one.
            ConventionError: the head predicts no better than chance.
        """
        starts = None if tokenizer is None else starts_for(tokenizer)
        loaded = load_eagle_head(
            folder, model, kind=cls.kind, layer_ids=layer_ids, starts=starts
        )
        draft = cls(model, loaded.head, loaded.layers)
        draft.say(loaded.notice)
        return draft

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> MtpDrafter:
        """Return a drafter for one stream; it follows the lane of the target."""
        return MtpDrafter(
            self.new_cache,
            sequence,
            self.following(lane, self.eagle.states),
            depth=self.eagle.head.depth,
            source=self.kind,
            ids=self.eagle.head.ids,
            trees=self.trees,
        )

    @property
    def trees(self) -> bool:
        """Return whether the head drafts trees; a head with a window cannot."""
        return not self.head.windowed

    def new_cache(self, first: int) -> HeadCache:
        """Return caches of the head; see `Draft`."""
        return MtpCache(self.eagle, first)


class PEagleDraft(EagleDraft):
    """A P-EAGLE head on its target; see `EagleDraft`.

    The head drafts all tokens of a round in one forward.
    """

    kind = "peagle"
    head: PEagleHead
    eagle: PEagle
    fits = staticmethod(is_peagle)

    def _on_target(self, layers: tuple[int, ...]) -> Eagle:
        return PEagle(self.head, self.taps, layers)

    @property
    def trees(self) -> bool:
        """Return False: the head drafts chains only."""
        return False

    def new_cache(self, first: int) -> HeadCache:
        """Return caches of the head; see `Draft`."""
        return HeadCache(self.eagle, [self.eagle.new_caches()], first)
