"""The drafters of blocks in folders of their own: DFlash, DFlash2 and DSpark.

They draft a block in one forward. What they read of the target, and when, is as for an
MTP head (see `engine/drafters/mtp.py`): the context that was committed since and the
block are one batch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import mlx.nn as nn

from mlx_speculation.engine.drafters.draft import (
    HeadDraft,
    check_embedding,
)
from mlx_speculation.engine.drafters.mtp import MtpDrafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import HiddenStates, Lane
from mlx_speculation.models.checkpoints import LayerIds
from mlx_speculation.models.dflash import (
    Anchor,
    DFlash,
    DFlashHead,
    LoadedDFlash,
    is_dflash,
    load_dflash,
)
from mlx_speculation.models.dflash2 import DFlash2, is_dflash2, load_dflash2
from mlx_speculation.models.dspark import (
    DSpark,
    DSparkHead,
    is_dspark,
    load_dspark,
)
from mlx_speculation.models.gemma_assistant import starts_for
from mlx_speculation.models.mtp import HeadCache


class DFlashDraft(HeadDraft):
    """A DFlash drafter on its target, as the draft of a generator.

        model, tokenizer = load(folder)
        draft = DFlashDraft.from_folder(drafter_folder, model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    Args:
        model: the target.
        head: the drafter.
        layers: of the target, from 0, whose outputs it reads, in order; -1: the
            embeddings.

    Raises:
        UnsupportedModelError: the target does not show what the drafter reads.
    """

    kind = "dflash"
    head: DFlashHead
    fits = staticmethod(is_dflash)
    _load: Callable[..., LoadedDFlash] = staticmethod(load_dflash)

    def __init__(
        self, model: nn.Module, head: DFlashHead, layers: tuple[int, ...]
    ) -> None:
        self.taps = HiddenStates(model, layers=layers, after_norm=True)
        if "embed_tokens" not in head:
            self.taps.parts.require("entry")
        self.model, self.head = model, head
        self.dflash = self._on_target(layers)

    def _on_target(self, layers: tuple[int, ...]) -> DFlash:
        return DFlash(self.head, self.taps, layers)

    @classmethod
    def _of(cls, model: nn.Module, loaded: LoadedDFlash) -> Self:
        made = cls(model, loaded.head, loaded.layers)
        made.say(loaded.notice)
        return made

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        model: nn.Module,
        *,
        layer_ids: LayerIds | None = None,
        anchor: Anchor | None = None,
        tokenizer: Any = None,
    ) -> Self:
        """Load a drafter; see `load_dflash` and `load_dspark`.

        Args:
            folder: the drafter's; of DSpark also a GGUF file.
            model: the target.
            layer_ids: what the list of layers in config.json counts: "layers", or
                "tuple", in which 0 is the embedding.
            anchor: what row j of a block is for: "given", its own position, or
                "samples", the one after it.
            tokenizer: the target's. Where config.json leaves one of these open, and it
                was not named, or lists no layers, the target writes about 64 tokens,
                and the drafter guesses them in each reading; another than the usual one
                is taken only if it is surely better. Without a tokenizer the usual one
                is. `notice` says which layers are read where config.json does not.

        Raises:
            ModelFolderError: the folder holds no such drafter, or not all of one.
            ConventionError: the drafter guesses no better than by chance.
        """
        starts = None if tokenizer is None else starts_for(tokenizer)
        loaded = cls._load(
            folder, model, layer_ids=layer_ids, anchor=anchor, starts=starts
        )
        return cls._of(model, loaded)

    def new_cache(self, first: int) -> HeadCache:
        """Return caches of the drafter; see `HeadDraft`."""
        return HeadCache(self.dflash, [self.dflash.new_caches()], first)

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> MtpDrafter:
        """Return the drafter of one stream, which follows the target's lane."""
        return MtpDrafter(
            self.new_cache,
            sequence,
            self.following(lane, self.dflash.states),
            depth=self.dflash.head.depth,
            source=self.kind,
            ids=self.dflash.head.ids,
        )


class DFlash2Draft(DFlashDraft):
    """A DFlash2 drafter on its target; see `DFlashDraft`.

    It chooses each draft among a few candidates, whose scores depend on the draft
    before.
    """

    kind = "dflash2"
    fits = staticmethod(is_dflash2)

    def _on_target(self, layers: tuple[int, ...]) -> DFlash:
        return DFlash2(self.head, self.taps, layers)

    @classmethod
    def from_folder(  # type: ignore[override]  # its anchor is given
        cls,
        folder: str | Path,
        model: nn.Module,
        *,
        layer_ids: LayerIds | None = None,
        tokenizer: Any = None,
    ) -> Self:
        """Load a drafter; see `load_dflash2` and `DFlashDraft`."""
        starts = None if tokenizer is None else starts_for(tokenizer)
        loaded = load_dflash2(folder, model, layer_ids=layer_ids, starts=starts)
        return cls._of(model, loaded)


class DSparkDraft(DFlashDraft):
    """A DSpark drafter on its target; see `DFlashDraft`.

    What it drafts next depends on the draft before.
    """

    kind = "dspark"
    head: DSparkHead
    dflash: DSpark
    fits = staticmethod(is_dspark)
    _load = staticmethod(load_dspark)

    def _on_target(self, layers: tuple[int, ...]) -> DFlash:
        return DSpark(self.head, self.taps, layers)

    def check_ids(self, highest: int) -> None:
        """Refuse a drafter that lacks token ids; see `HeadDraft`."""
        super().check_ids(highest)
        if "markov_head" in self.head:
            check_embedding(self.head.markov_head.markov_w1, highest)
