"""The drafters DFlash, DFlash2 and DSpark, which draft a block in one forward.

Each is loaded from its own folder. Like an MTP head (see `engine/drafters/mtp.py`),
each reads the target's hidden states. One forward covers the positions committed since
the last draft, followed by the block.
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
from mlx_speculation.models.checkpoints import LayerIds, Loaded
from mlx_speculation.models.dflash import (
    Anchor,
    DFlash,
    DFlashHead,
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
        layers: indices, from 0, of the target's layers whose outputs the drafter reads,
            in order; -1: the embeddings.

    Raises:
        UnsupportedModelError: the target's structure gives no access to these outputs.
    """

    kind = "dflash"
    head: DFlashHead
    fits = staticmethod(is_dflash)
    _load: Callable[..., Loaded] = staticmethod(load_dflash)

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
    def from_folder(
        cls,
        folder: str | Path,
        model: nn.Module,
        *,
        layer_ids: LayerIds | None = None,
        anchor: Anchor | None = None,
        tokenizer: Any = None,
    ) -> Self:
        """Load a drafter; see `load_dflash`, `load_dflash2` and `load_dspark`.

        Args:
            folder: the drafter's folder; for DSpark a GGUF file is possible too.
            model: the target.
            layer_ids: how the list of layers in config.json counts: "layers" (0 is the
                first layer) or "tuple" (0 is the embedding); None: see `tokenizer`.
            anchor: the position that a row of a block predicts: its own ("given") or
                the next one ("samples"); None: see `tokenizer`.
            tokenizer: the target's tokenizer, to find a `layer_ids` or `anchor` that is
                None and not in config.json: the target generates about 64 tokens, and
                the drafter predicts them with each possible value. An unusual value is
                taken only if it is surely better; without a tokenizer, the usual value
                is taken. If config.json lists no layers, the draft's `notice` names the
                layers that are read.

        Raises:
            ModelFolderError: the folder holds no such drafter, or only a part of one.
            ConventionError: the drafter predicts no better than chance.
        """
        starts = None if tokenizer is None else starts_for(tokenizer)
        loaded = cls._load(
            folder, model, layer_ids=layer_ids, anchor=anchor, starts=starts
        )
        made = cls(model, loaded.head, loaded.layers)
        made.say(loaded.notice)
        return made

    def new_cache(self, first: int) -> HeadCache:
        """Return caches of the drafter; see `Draft`."""
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

    The drafter chooses each drafted token among a few candidates, whose scores depend
    on the token before.
    """

    kind = "dflash2"
    fits = staticmethod(is_dflash2)
    _load = staticmethod(load_dflash2)

    def _on_target(self, layers: tuple[int, ...]) -> DFlash:
        return DFlash2(self.head, self.taps, layers)


class DSparkDraft(DFlashDraft):
    """A DSpark drafter on its target; see `DFlashDraft`.

    The logits of each drafted token depend on the token before.
    """

    kind = "dspark"
    head: DSparkHead
    dflash: DSpark
    fits = staticmethod(is_dspark)
    _load = staticmethod(load_dspark)

    def _on_target(self, layers: tuple[int, ...]) -> DFlash:
        return DSpark(self.head, self.taps, layers)

    def check_ids(self, highest: int) -> None:
        """Check the embeddings in the Markov head too; see `HeadDraft`."""
        super().check_ids(highest)
        if "markov_head" in self.head:
            check_embedding(self.head.markov_head.markov_w1, highest)
