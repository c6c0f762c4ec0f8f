"""The drafter that is a DFlash model in a folder of its own.

It drafts a block in one forward. What it reads of the target, and when, is as for an
MTP head (see `engine/drafters/mtp.py`): the context that was committed since and the
block are one batch.
"""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_speculation.engine.drafters.mtp import MtpDrafter
from mlx_speculation.engine.drafters.source import HeadSource
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import HiddenStates, Lane
from mlx_speculation.models.dflash import (
    DFlash,
    DFlashContext,
    DFlashHead,
    is_dflash,
    load_dflash,
)


class DFlashDraft(HeadSource):
    """A DFlash drafter on its target, as the draft of a generator.

        model, tokenizer = load(folder)
        draft = DFlashDraft.from_folder(drafter_folder, model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    Args:
        model: the target.
        head: the drafter.
        layers: of the target, from 0, whose outputs it reads, in order.

    Raises:
        UnsupportedModelError: the target does not show what the drafter reads.
    """

    kind = "dflash"
    head: DFlashHead
    fits = staticmethod(is_dflash)

    def __init__(
        self, model: nn.Module, head: DFlashHead, layers: tuple[int, ...]
    ) -> None:
        self.taps = HiddenStates(model, layers=layers, after_norm=True)
        if "embed_tokens" not in head:
            self.taps.parts.require("entry")
        self.model, self.head = model, head
        self.dflash = DFlash(head, self.taps, layers)

    @classmethod
    def from_folder(
        cls, folder: str | Path, model: nn.Module, *, tokenizer: Any = None
    ) -> "DFlashDraft":
        """Load a drafter; see `load_dflash`. The tokenizer is not needed."""
        return cls(model, *load_dflash(folder, model))

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> MtpDrafter:
        """Return the drafter of one stream, which follows the target's lane."""
        return MtpDrafter(
            partial(DFlashContext, self.dflash),
            sequence,
            self.following(lane, self.dflash.states),
            depth=self.dflash.head.depth,
            source="dflash",
            ids=self.dflash.head.ids,
        )
