"""The drafter that is a Gemma 4 assistant, which reads the target's own KV.

With t_n the newest known token, N = n committed positions before it, h_i the target's
states and k = 3:

    step 1     t_n and h_n-1       gives d_1 and g_1
    step 2     d_1 and g_1         gives d_2 and g_2
    step 3     d_2 and g_2         gives d_3

Every step sees the target's keys and values of positions 0 to N - 1, and stands at one
position, its anchor. So nothing has to be undone after a round: what a draft left is
nowhere. The target's caches are read in `propose`, before its forward of the round, and
no array of them is held when that writes.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine.argument_checks import checked_choice
from mlx_speculation.engine.drafters.base import (
    Choose,
    DraftChain,
    OpenDrafter,
    Proposal,
)
from mlx_speculation.engine.drafters.draft import HeadDraft
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError, UnsupportedModelError
from mlx_speculation.models import CommittedStates, HiddenStates, Lane
from mlx_speculation.models.gemma_assistant import (
    Anchor,
    Assistant,
    SharedKv,
    is_assistant,
    load_assistant,
    position_of,
    probe_anchor,
    starts_for,
)

SOURCE = "assistant"


class AssistantDraft(HeadDraft):
    """A Gemma 4 assistant on its target, as the draft of a generator.

        model, tokenizer = load(folder)
        draft = AssistantDraft.from_folder(assistant_folder, model)
        generator = SpeculativeGenerator(model, tokenizer, draft=draft)

    Args:
        model: the target.
        assistant: its assistant.
        anchor: the position at which all drafts of a round stand: "state", that of the
            state they begin with, the last one in the caches; or "token", that of the
            newest token, one further.

    Raises:
        UnsupportedModelError: the target does not show what the assistant reads, or
            has another shape than it was made for.
        InvalidRequestError: the anchor is none.
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
                f"The assistant takes states of {wide} numbers, and the target's have "
                f"{dim}. Choose the assistant that belongs to this model."
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
            folder: the assistant's.
            model: the target.
            anchor: see the class. When omitted, the target writes about 64 tokens, and
                the assistant guesses them from either place; "token" is taken only if
                it is surely better. Without a tokenizer it is "state".
            tokenizer: the target's.

        Raises:
            ModelFolderError: the folder holds none, or not all of one.
            ConventionError: the assistant guesses no better than by chance.
            UnsupportedModelError: it belongs to another target.
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
            UnsupportedCacheError: its caches cannot be read.
        """
        self.shared.check(lane.caches)
        committed = self.following(lane, attrgetter("after_norm"))
        return AssistantDrafter(self, lane, sequence, committed)

    def embed(self, tokens: mx.array) -> mx.array:
        """Return ids [n] as the target's first layer is given them, [1, n, dim]."""
        return self.taps.embed(tokens[None], scaled=True)


class AssistantDrafter(OpenDrafter):
    """Drafts with an assistant in one stream, from the last committed state."""

    again = 1  # the last token is fed again, for its state

    def __init__(
        self,
        draft: AssistantDraft,
        target: Lane,
        sequence: Sequence,
        committed: CommittedStates,
    ) -> None:
        self._draft, self._tokens = draft, sequence.tokens
        self._target, self.committed = target, committed
        committed.after_chunk(self._forget)

    @property
    def prefix_head(self) -> "AssistantDrafter":
        """Itself: it needs the state of the last token that was fed."""
        return self

    @property
    def held(self) -> list[Any]:
        """States of the target to be read, for a count of bytes."""
        return self.committed.arrays

    def begin(self, sequence: Sequence) -> None:
        """Make the state after the prompt, which would hold rows of a cache if late."""
        self._forget()
        mx.async_eval(*self.committed.arrays)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Draft behind the known tokens.

        Nothing is proposed where the state before the newest token was never seen,
        since it is out of a passed cache.
        """
        self._forget()
        newest, committed = len(self._tokens) - 1, self.committed
        if not committed.start < newest <= committed.stop:
            return Proposal(mx.array([], mx.uint32), source=SOURCE)
        chain = DraftChain(choose, sequence)
        token = mx.array(self._tokens[newest:], mx.uint32)
        self._chain(token, committed.between(newest - 1, newest), limit, chain)
        return Proposal.of(chain.chosen, source=SOURCE)

    def _chain(
        self, token: mx.array, state: mx.array, count: int, chain: DraftChain
    ) -> None:
        """Run at most `count` steps. What is read of the target is gone at the end."""
        draft, target = self._draft, self._target
        # A step in flight may have written the newest token's position already.
        behind = target.seen - (len(self._tokens) - 1)
        layers = target.layers([*draft.shared.places.values()])
        read, stop = draft.shared.read(layers, behind)
        position = position_of(draft.anchor, stop)
        for _ in range(count):
            out = draft.step(draft.embed(token), state, read, position)
            token = chain.add(out.logits, out.ids)
            state = out.state

    def _forget(self) -> None:
        """Drop the states that will not be read; of a prompt, all but the last."""
        last = self.committed.stop - 1  # a restore point keeps it
        self.committed.drop(min(len(self._tokens) - 2, last))
