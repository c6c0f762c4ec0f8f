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
from mlx_speculation.engine.drafters.source import (
    HeadSource,
    TargetInfo,
    check_drafted,
    check_embedding,
)
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import CommittedStates, HiddenStates, Lane, MtpConvention
from mlx_speculation.models.dflash import (
    DFlash,
    DFlashContext,
    DFlashHead,
    is_dflash,
    load_dflash,
)

NAME = "DFlash drafter"


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
    fits = staticmethod(is_dflash)

    def __init__(
        self, model: nn.Module, head: DFlashHead, layers: tuple[int, ...]
    ) -> None:
        self._taps = HiddenStates(model, layers=layers, after_norm=True)
        if "embed_tokens" not in head:
            self._taps.parts.require("entry")
        self._head = head
        self.model, self.dflash = model, DFlash(head, self._taps, layers)

    @classmethod
    def from_folder(cls, folder: str | Path, model: nn.Module) -> "DFlashDraft":
        """Load a drafter; see `load_dflash`."""
        return cls(model, *load_dflash(folder, model))

    @classmethod
    def load(
        cls,
        folder: Path,
        target: TargetInfo,
        convention: MtpConvention | None = None,
        trust_remote_code: bool = False,
    ) -> "DFlashDraft":
        """Load a drafter; see `LoadedSource`."""
        return cls.from_folder(folder, target.model)

    def check_ids(self, highest: int) -> None:
        """Refuse a drafter of other token ids; see `HeadSource`."""
        if "embed_tokens" in self._head:
            check_embedding(self._head.embed_tokens, NAME, highest)
        check_drafted(self._head.ids, NAME, highest)

    @property
    def own_weights(self) -> nn.Module:
        """The drafter's own; what it shares with the target is not in it."""
        return self._head

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> MtpDrafter:
        """Return the drafter of one stream, which follows the target's lane."""
        committed = CommittedStates(self._taps, self.dflash.states)
        lane.follower = committed
        return MtpDrafter(
            partial(DFlashContext, self.dflash),
            sequence,
            committed,
            depth=self.dflash.head.depth,
            source="dflash",
            ids=self.dflash.head.ids,
        )
