"""The drafter that looks up what followed the same tokens before. It runs no model.

For calibration a constant proposal stands in its place: the tokens of a lookup depend
on the text, the cost of verifying them does not.
"""

import copy
import operator
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.drafters.base import NOTHING, Choose, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.cascade import CascadeDraft
from mlx_speculation.engine.drafters.draft import Draft, DraftOptions, members_of
from mlx_speculation.engine.lookup.lookup import Lookup, SharedPlaces
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane

_LARGEST_ID = 2**31 - 1
_NOTHING_FOUND = replace(NOTHING, source="lookup")
# Tokens of earlier answers that are held; about 20 MB with their index.
HISTORY = 200_000


class LookupDraft(Draft):
    """Proposes what followed the longest suffix of the text that occurred before.

        generator = SpeculativeGenerator(model, tokenizer, draft=LookupDraft())

    It looks in the text, in the stream's `prediction`, in the answers of earlier
    requests and in documents, and takes the longest match of all. How probable its
    tokens are is learnt while it runs; with the adaptive draft length only those are
    drafted that pay for their rows, see `engine.draft_length.rule`. A generator makes a
    drafter of its own for each stream; all else is shared by them.

    Args:
        corpus: documents to look in as well, each a list of token ids of the target's
            tokenizer. A draft never runs past the end of one.
        history: how many tokens of earlier answers to look in as well, the oldest
            dropped; 0: none. None: 200,000 under the acceptance rule "keyed", by which
            no draft changes a text, and none under the others, so that a seed repeats
            its text whatever came before.

    Raises:
        InvalidRequestError: an option is out of range, or a document holds no ids.
    """

    kind = "lookup"
    free = True

    def __init__(
        self, *, corpus: Iterable[Iterable[int]] = (), history: int | None = None
    ) -> None:
        self._documents = [_checked_ids(n, each) for n, each in enumerate(corpus)]
        self._limit = history
        if history is not None:
            checked_count("history", history, 0, ", or None")
        self.places = SharedPlaces(
            self._documents, HISTORY if history is None else history
        )

    def cost_key(self) -> str:
        """Return the kind: every lookup costs next to nothing."""
        return self.kind

    def configured(self, options: DraftOptions) -> "LookupDraft":
        """Return one with the same places, as far as the rule allows a history."""
        if options.history or self._limit is not None:
            return self
        draft = copy.copy(self)
        draft.places = SharedPlaces(self._documents)
        return draft

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "LookupDrafter":
        """Return a drafter with a text of its own."""
        return LookupDrafter(self)


class LookupDrafter(OpenDrafter):
    """Looks up in one stream's text, and in what its draft has for all of them."""

    free = True

    def __init__(self, draft: LookupDraft) -> None:
        self._draft = draft
        self._sequence: Sequence | None = None
        self._lookup = Lookup(draft.places)

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Index one chunk, some 8 ms, which is no chunk of the target's."""
        return self._of(sequence).read_ahead(sequence.tokens)

    def begin(self, sequence: Sequence) -> None:
        """Index the prompt, as far as it is new."""
        lookup = self._of(sequence)
        while not lookup.read_ahead(sequence.tokens):
            pass

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose what followed the longest match; nothing where there is none."""
        result = self._of(sequence).propose(sequence.tokens, limit)
        if not result.tokens:
            return _NOTHING_FOUND
        source = "prediction" if result.place == "prediction" else "lookup"
        tokens = mx.array(result.tokens, mx.uint32)
        return Proposal(tokens, source=source, survival=result.survival)

    def remember(self, tokens: SequenceOf[int], answer: int) -> None:
        """Leave the finished text, of which `tokens[answer:]` is new, to later ones."""
        self._lookup.end(tokens, answer)

    def _of(self, sequence: Sequence) -> Lookup:
        """Return the lookup of this sequence; a new one for another sequence."""
        if self._sequence is not sequence:
            self._lookup = Lookup(self._draft.places, sequence.prediction)
            self._sequence = sequence
        return self._lookup


def measured_draft(draft: Draft | None) -> Draft:
    """Return a draft without its lookups; where nothing is left, one in their place."""
    others = [each for each in members_of(draft) if not each.free]
    if len(others) > 1:
        return CascadeDraft(*others)
    return others[0] if others else ConstantDraft()


class ConstantDraft(Draft):
    """Stands for lookups: its drafters propose the last token again and again."""

    kind = "filler"

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "ConstantDrafter":
        """Return the drafter of one stream."""
        return ConstantDrafter()


class ConstantDrafter(OpenDrafter):
    """Proposes the last token again, as often as it is asked to."""

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose `limit` tokens."""
        tokens = mx.array(sequence.tokens[-1:] * limit, mx.uint32)
        return Proposal(tokens, source=ConstantDraft.kind)


def _checked_ids(number: int, document: Any) -> list[int]:
    """Return a document as plain integers."""
    try:
        ids = document.tolist() if hasattr(document, "tolist") else document
        tokens = [operator.index(token) for token in ids]
    except TypeError as error:
        raise InvalidRequestError(
            f"Document {number} of the corpus is a {type(document).__name__} that "
            "holds no token ids. Encode it with the target's tokenizer."
        ) from error
    wrong = next((token for token in tokens if not 0 <= token <= _LARGEST_ID), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"Document {number} of the corpus has a token id {wrong}, and ids go from "
            f"0 to {_LARGEST_ID}. Encode it with the target's tokenizer."
        )
    return tokens
