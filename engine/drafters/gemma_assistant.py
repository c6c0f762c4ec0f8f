"""The drafter with a Gemma 4 assistant, which reads the target's keys and values.

Let t_n be the newest known token, h_i the target's state at position i, d_j the drafted
tokens and g_j the assistant's states. With k = 3:

    step 1     t_n and h_n-1       gives d_1 and g_1
    step 2     d_1 and g_1         gives d_2 and g_2
    step 3     d_2 and g_2         gives d_3

Every step reads the target's keys and values of positions 0 to n - 1, and all steps
have the same position, the anchor. A draft writes to no cache, so a rollback has
nothing to undo. `propose` reads the target's caches before the target's forward of the
round, and holds none of their arrays when that forward writes to them.
"""

from collections.abc import Sequence as SequenceOf
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine.argument_checks import checked_choice
from mlx_speculation.engine.drafters.draft import HeadDraft
from mlx_speculation.engine.drafters.mtp import MtpDrafter
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import HiddenStates, Lane
from mlx_speculation.models.checkpoints import ChooseNext
from mlx_speculation.models.gemma_assistant import (
    Anchor,
    Assistant,
    Read,
    SharedKv,
    is_assistant,
    load_assistant,
    position_of,
    probe_anchor,
    starts_for,
)
from mlx_speculation.models.mtp import HeadCache

SOURCE = "assistant"


class AssistantDraft(HeadDraft):
    """A Gemma 4 assistant on its target, as the draft of a generator.

        model, tokenizer = load(folder)
        draft = AssistantDraft.from_folder(assistant_folder, model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    Args:
        model: the target.
        assistant: the assistant of this target.
        anchor: the position of all drafting steps of a round: "state", the last
            position in the target's caches; or "token", the position after it, which
            is that of the newest token.

    Raises:
        UnsupportedModelError: the assistant was made for another target, or the
            target's structure does not give access to what the assistant reads.
        InvalidRequestError: the anchor is neither of the two.
    """

    kind = SOURCE
    fits = staticmethod(is_assistant)

    def __init__(
        self, model: nn.Module, assistant: Assistant, *, anchor: Anchor = "state"
    ) -> None:
        checked_choice("anchor", anchor, Anchor)
        self.taps = HiddenStates(model, after_norm=True)
        self.taps.parts.require("entry")
        dim, wide = self.taps.parts.dim, assistant.settings.target_dim
        if dim != wide:
            raise UnsupportedModelError(
                f"The assistant was made for a target of hidden size {wide}, but this "
                f"target has {dim}. Choose the assistant that belongs to this model."
            )
        self.model, self.head = model, assistant
        self.assistant = assistant
        self.anchor: Anchor = anchor
        self.step = assistant.step
        self.shared = SharedKv(model, assistant)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        model: nn.Module,
        *,
        anchor: Anchor | None = None,
        tokenizer: Any = None,
    ) -> "AssistantDraft":
        """Load an assistant from a folder of its own.

        Args:
            folder: the assistant's folder.
            model: the target.
            anchor: see the class. None: the target generates about 64 tokens, and the
                assistant predicts them from either anchor; "token" is taken only if it
                is surely better. Without a tokenizer "state" is taken.
            tokenizer: the target's tokenizer.

        Raises:
            ModelFolderError: the folder holds no assistant, or only a part of one.
            ConventionError: the assistant predicts no better than chance.
            UnsupportedModelError: the assistant belongs to another target.
        """
        assistant = load_assistant(folder)
        draft = cls(model, assistant, anchor=anchor or "state")  # checks the fit
        if anchor is None and tokenizer is not None:
            scores = probe_anchor(assistant, model, starts_for(tokenizer))
            draft.anchor = next(iter(scores))
        return draft

    def check_ids(self, highest: int) -> None:
        """Refuse an assistant that knows fewer tokens than its target."""
        vocab = self.assistant.settings.layers.vocab_size
        if vocab <= highest:
            raise InvalidRequestError(
                f"The assistant has {vocab} token ids, and the target's go up to "
                f"{highest}. Choose the assistant that belongs to this model."
            )

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "AssistantDrafter":
        """Return the drafter of one stream, which follows the target's lane.

        Raises:
            UnsupportedCacheError: the assistant cannot read the target's caches.
        """
        self.shared.check(lane.caches)
        return AssistantDrafter(self, lane, sequence)

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the inputs [n, 1, dim] of the target's first layer for ids [n]."""
        return self.taps.embed(tokens[:, None], scaled=True)


class AssistantDrafter(MtpDrafter):
    """Drafts with an assistant in one stream, from the last committed state.

    An assistant has no caches, so the drafter drops all states but the last.
    """

    def __init__(self, draft: AssistantDraft, target: Lane, sequence: Sequence) -> None:
        self._draft = draft
        on_target = AssistantOnTarget(draft, [target], [sequence.tokens])
        committed = draft.following(target, attrgetter("after_norm"))
        new_cache = partial(HeadCache, on_target, [[]])
        super().__init__(new_cache, sequence, committed, source=SOURCE)

    def begin(self, sequence: Sequence) -> None:
        """Evaluate the last state, whose graph would keep cache arrays alive."""
        super().begin(sequence)
        mx.async_eval(*self.committed.arrays)

    def on_target(self, requests: SequenceOf[Any]) -> "AssistantOnTarget":
        """Return the assistant on its target, to draft for requests together."""
        lanes = [request.target for request in requests]
        texts = [request.sequence.tokens for request in requests]
        return AssistantOnTarget(self._draft, lanes, texts)

    def _read_chunk(self) -> None:
        # The last state remains, for a restore point.
        self._catch_up(0, until=self.committed.stop - 1)


class AssistantOnTarget:
    """An assistant on its target, for some texts; see `ParallelHead`.

    Args:
        draft: the assistant.
        lanes: the target's lane for each text; if several, all are of one batch.
        texts: the known tokens of each text.
    """

    def __init__(
        self,
        draft: AssistantDraft,
        lanes: SequenceOf[Lane],
        texts: SequenceOf[list[int]],
    ) -> None:
        self._draft, self._lanes, self._texts = draft, lanes, texts

    def history(self, *_: Any) -> None:
        """Do nothing: the target has written the keys and values."""

    def draft(
        self,
        hidden: mx.array,
        tokens: mx.array,
        caches: SequenceOf[Any],
        count: int,
        choose: ChooseNext,
    ) -> None:
        """Draft `count` tokens; hold no array of the target's caches afterwards."""
        draft, state, token = self._draft, hidden[:, -1:], tokens[:, -1]
        read, position = self._read()
        for _ in range(count):
            out = draft.step(draft.embed(token), state, read, position)
            token, state = choose(out.logits, out.ids), out.state

    def _read(self) -> tuple[Read, Any]:
        """Return the target's keys and values for each text, and the anchors."""
        draft, lanes = self._draft, self._lanes
        stops = [len(text) - 1 for text in self._texts]
        seen = [lane.seen for lane in lanes]
        batch = lanes[0].holder
        if batch is None:
            # A step in flight may have written the newest token's position already.
            read, stop = draft.shared.read(lanes[0].caches, seen[0] - stops[0])
            return read, position_of(draft.anchor, stop)
        places = batch.places_of(lanes)
        read = draft.shared.read_together(batch.caches, places, stops, seen)
        positions = [position_of(draft.anchor, stop) for stop in stops]
        return read, mx.array(positions)
