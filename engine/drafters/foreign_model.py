"""The drafter that is a smaller model of another family, with a tokenizer of its own.

It reads the text in its own tokens and drafts those alone that the target has too
(token-level intersection, 2502.05202), so that each drafted token is one of the target:

    target    The  Ġquick  Ġfox        known
    draft     The  Ġqu  ick  Ġfox      what it reads
    drafts    Ġjumps Ġover             both have these; Ġjum and others are left out

What the target has in one token and the draft in several is never drafted. The target
verifies as always, so that the text is its own.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.engine.drafters.base import Choose, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.common_tokens import CommonTokens
from mlx_speculation.engine.drafters.draft import (
    DraftOptions,
    TargetInfo,
)
from mlx_speculation.engine.drafters.draft_model import ModelDraft
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane, load, logit_width
from mlx_speculation.samplers import Choice, Rows


class ForeignModelDraft(ModelDraft):
    """A draft model with another tokenizer than the target's, as a draft.

        draft = ForeignModelDraft.load(folder, target)

    Args:
        model: an mlx-lm model.
        common: its tokens and the target's.
        options: of the generator.
    """

    kind = "foreign model"
    foreign = True
    reducible = False

    def __init__(
        self,
        model: nn.Module,
        common: CommonTokens,
        options: DraftOptions | None = None,
    ) -> None:
        super().__init__(model, options)
        self.common = common
        self.notice = (
            f"The draft has another tokenizer than the target: {common.share}."
        )

    @staticmethod
    def fits(config: dict[str, Any]) -> bool:
        """Take none by itself: another tokenizer has to be asked for."""
        return False

    @classmethod
    def load(cls, folder: Path, target: TargetInfo) -> "ForeignModelDraft":
        """Load a model; see `FolderDraft`.

        Raises:
            TokenizerMismatchError: the tokenizers have too few tokens in common.
        """
        model, tokenizer = load(folder, trust_remote_code=target.trust_remote_code)
        return cls(model, CommonTokens(target.tokenizer, tokenizer))

    def check(self, target: TargetInfo) -> None:
        """Refuse a draft without a row for a token of its own."""
        width, highest = logit_width(self.model), max(self.common.draft.bytes)
        if width <= max(self.common.pairs.values()):
            raise InvalidRequestError(
                f"The draft has {width} token ids, and those of its tokenizer go up to "
                f"{highest}. Load it with the tokenizer that it was trained with."
            )

    def configured(self, options: DraftOptions) -> "ForeignModelDraft":
        """Return the model with these options."""
        return ForeignModelDraft(self.model, self.common, options)

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "ForeignModelDrafter":
        """Return the drafter of one stream.

        Raises:
            InvalidRequestError: caches were passed, which hold other tokens.
        """
        if draft_cache is not None:
            raise InvalidRequestError(
                "draft_cache was passed, and the draft has another tokenizer than the "
                "target. Leave draft_cache out."
            )
        return ForeignModelDrafter(super().open(lane, Sequence([])), self.common)


class ForeignModelDrafter(OpenDrafter):
    """Drafts with a `ModelDrafter` that reads the text in its own tokens."""

    def __init__(self, inner: OpenDrafter, common: CommonTokens) -> None:
        self._inner, self._common = inner, common
        pairs = common.pairs
        self._theirs = mx.array(list(pairs), mx.uint32)  # [n], of the target
        self._own = mx.array(list(pairs.values()), mx.uint32)  # [n], the same tokens
        self._table = mx.zeros(max(pairs) + 1, mx.uint32)
        self._table[self._theirs] = self._own
        self._text = Sequence([])  # in tokens of the draft
        self._read = 0  # how many tokens of the sequence are in it

    @property
    def lanes(self) -> list[Lane | None]:
        """None: what its lane holds are other tokens than the target's."""
        return [None]

    @property
    def held(self) -> SequenceOf[Any]:
        """The caches, for a count of bytes."""
        return self._inner.held

    def begin(self, sequence: Sequence) -> None:
        """Put the text in the draft's tokens, and read it."""
        self._read = len(sequence.tokens)
        self._text = Sequence(self._common.whole(_seen(sequence)))
        self._inner.begin(self._text)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Read what is new, and draft tokens that both have."""
        for token in sequence.tokens[self._read :]:
            self._text.tokens += self._common.each(token)
        self._read = len(sequence.tokens)
        chosen: list[Choice] = []

        def choose_common(
            logits: mx.array, rows: Rows, ids: mx.array | None = None
        ) -> Choice:
            ahead = Proposal.of(chosen).tokens if chosen else None
            common = logits[:, self._own]
            chosen.append(choose(common, sequence.rows(ahead), self._theirs))
            found = chosen[-1].tokens
            own = self._table[mx.minimum(found, len(self._table) - 1)]
            return replace(chosen[-1], tokens=own)

        made = self._inner.propose(self._text, limit, choose_common)
        if not chosen:
            return replace(made, source=ForeignModelDraft.kind)
        return Proposal.of(chosen, source=ForeignModelDraft.kind, reads=made.reads)

    def settle(self, accepted: int) -> None:
        """Keep those of the accepted tokens that were fed."""
        self._inner.settle(accepted)

    def discard(self) -> None:
        """Undo the round."""
        self._inner.discard()


def _seen(sequence: Sequence) -> list[int]:
    """Return the tokens without those that stand for images, which it does not see."""
    found: list[int] = []
    start = 0
    for begin, stop in sequence.images:
        found += sequence.tokens[start:begin]
        start = stop
    return found + sequence.tokens[start:]
