"""The draft and the drafter of a lookup, and their substitute in calibrations."""

import operator
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.argument_checks import checked_count
from mlx_speculation.engine.drafters.base import Choose, Drafter, OpenDrafter, Proposal
from mlx_speculation.engine.drafters.draft import Draft, DraftOptions, members_of
from mlx_speculation.engine.lookup.lookup import Lookup, SharedPlaces
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models import Lane

_LARGEST_ID = 2**31 - 1
HISTORY = 200_000  # tokens of earlier answers to keep; about 20 MB with their index


class LookupDraft(Draft):
    """Proposes what followed earlier occurrences of the text's last tokens.

        generator = SpeculativeGenerator(model, tokenizer, draft=LookupDraft())

    A lookup takes the longest match in the text, the stream's `prediction`, earlier
    answers, or the documents. Streams share earlier answers and documents.

    Args:
        corpus: documents to search, each a list of token ids of the target's
            tokenizer. A draft never continues beyond the end of a document.
        history: how many tokens of earlier answers to search; 0: no answers. None:
            200,000 under the acceptance rule "keyed", where no draft changes a text,
            and 0 under the other rules, so that a seed always gives the same text.

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
        limit = HISTORY if history is None else history
        checked_count("history", limit, 0, ", or None")
        self.places = SharedPlaces(self._documents, limit)

    def cost_key(self) -> str:
        """Return the kind, since all lookups have the same costs."""
        return self.kind

    def configured(self, options: DraftOptions) -> "LookupDraft":
        """Return the draft; its `history` None is 0 if `options.history` is false."""
        if options.history or self._limit is not None:
            return self
        return LookupDraft(corpus=self._documents, history=0)

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> "LookupDrafter":
        """Return the drafter of one stream."""
        return LookupDrafter(self)


class LookupDrafter(OpenDrafter):
    """Looks up in one stream's text and in the places that all streams share."""

    free = True

    def __init__(self, draft: LookupDraft) -> None:
        self._draft = draft
        self._sequence: Sequence | None = None
        self._lookup = Lookup(draft.places)

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Index one chunk, in about 8 ms, whatever `fits` returns."""
        return self._of(sequence).read_ahead(sequence.tokens)

    def begin(self, sequence: Sequence) -> None:
        """Index the rest of the prompt."""
        while not self._of(sequence).read_ahead(sequence.tokens):
            pass

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose the tokens that followed the longest match; none without a match."""
        result = self._of(sequence).propose(sequence.tokens, limit)
        source = "prediction" if result.place == "prediction" else "lookup"
        tokens = mx.array(result.tokens, mx.uint32)
        return Proposal(tokens, source=source, survival=result.survival)

    def remember(self, tokens: SequenceOf[int], answer: int) -> None:
        """Keep the finished text for later streams; `tokens[answer:]` is its answer."""
        self._lookup.end(tokens, answer)

    def _of(self, sequence: Sequence) -> Lookup:
        """Return the lookup of this sequence, a new one if the sequence is new."""
        if self._sequence is not sequence:
            self._lookup = Lookup(self._draft.places, sequence.prediction)
            self._sequence = sequence
        return self._lookup


def measured_draft(draft: Draft | None) -> Draft:
    """Return the first costly member; if there is none, a `ConstantDraft`."""
    return next((one for one in members_of(draft) if not one.free), ConstantDraft())


class ConstantDraft(Draft, Drafter):
    """A substitute for lookups: ids of tokens do not change the cost of a forward."""

    kind = "filler"

    def open(
        self, lane: Lane, sequence: Sequence, draft_cache: list[Any] | None = None
    ) -> Drafter:
        """Return the draft itself, which has no state."""
        return self

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Propose the last token repeatedly."""
        tokens = mx.array(sequence.tokens[-1:] * limit, mx.uint32)
        return Proposal(tokens, source=self.kind)


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
