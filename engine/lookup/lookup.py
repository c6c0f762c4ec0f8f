"""The longest match over all places, and the tokens that followed it.

The places are the text itself, a prediction of the answer, answers of earlier requests
and documents. The longest match wins; among equally long ones the place named first
wins, and within a place the latest match.
"""

import threading
from collections.abc import Sequence
from operator import eq
from typing import NamedTuple

from mlx_speculation.engine.lookup.automaton import BREAK, Match, SuffixAutomaton
from mlx_speculation.engine.lookup.places import (
    CHUNK,
    AnswerHistory,
    Cursor,
    GrowingIndex,
    TextPool,
)
from mlx_speculation.engine.lookup.survival import (
    PLACES,
    lookup_buckets,
    lookup_rates,
)

TEXT, PREDICTION, HISTORY, DOCUMENT = range(len(PLACES))
# The largest number of tokens of finished texts that stay indexed.
TEXTS = 1 << 18


class Found(NamedTuple):
    """Looked-up tokens."""

    tokens: list[int]  # the proposed continuation of the text
    survival: list[float]  # of each token; improbable last tokens are left out
    place: str  # one of `PLACES`; "" if there is no match
    buckets: list[int]  # of each token of `survival`, see the module `survival`


NOTHING_FOUND = Found([], [], "", [])


class SharedPlaces:
    """Documents, answers, indexed texts and rates that requests share.

    Args:
        documents: lists of token ids.
        history: the largest number of tokens of earlier answers.

    Attributes:
        lock: held while a request reads or changes these, since streams may run in
            several threads. Reentrant: garbage collection may end a stream during a
            call of the same thread.
    """

    def __init__(
        self, documents: Sequence[Sequence[int]] = (), history: int = 0
    ) -> None:
        self.history, self.texts = AnswerHistory(history), TextPool(TEXTS)
        self.rates = lookup_rates()
        self.lock = threading.RLock()
        self.documents = SuffixAutomaton()
        for document in documents:
            for token in (*document, BREAK):
                self.documents.append(token)


class Lookup:
    """The lookup of one request.

    A call of `propose` indexes at most one chunk of new tokens, follows at most
    `LONGEST_FALL` links for each new token and place, and copies `limit` tokens of each
    place.

    Args:
        shared: the places and rates that requests share.
        prediction: the tokens of an expected answer.
    """

    def __init__(self, shared: SharedPlaces, prediction: Sequence[int] = ()) -> None:
        self._shared = shared
        self._text: GrowingIndex | None = None
        self._prediction = GrowingIndex([*prediction, BREAK] if prediction else ())
        self._cursors = [Cursor() for _ in range(4)]
        self._unjudged = 0, NOTHING_FOUND  # the last proposal, and where it begins

    def read_ahead(self, tokens: Sequence[int], limit: int = CHUNK) -> bool:
        """Index at most `limit` new tokens.

        Returns:
            Whether all tokens are indexed; else only the indexed part is searched.
        """
        with self._shared.lock:
            if self._text is None:
                self._text = self._shared.texts.take(tokens)
            self._text.tokens = tokens
            growing = self._text, self._prediction, *self._shared.history.generations
            for index in growing:
                limit -= index.catch_up(limit)
            return all(index.complete for index in growing)

    def propose(self, tokens: Sequence[int], limit: int) -> Found:
        """Return at most `limit` tokens that followed the longest match."""
        with self._shared.lock:
            self._judge(tokens)
            self.read_ahead(tokens)
            matches = self._matches(tokens)
            if not matches:
                return NOTHING_FOUND
            (length, state), place, automaton = matches[0]
            result = automaton.continuation(state, limit)
            ahead = [
                _agreeing(result, elsewhere.continuation(other, limit))
                for (_, other), _, elsewhere in matches[1:]
            ]
            shares, same = automaton.shares(state, result), min(ahead, default=None)
            buckets = [*lookup_buckets(length, place, shares, same)]
            chances = self._shared.rates.survival(buckets)
            proposal = Found(result, chances, PLACES[place], buckets[: len(chances)])
            self._unjudged = len(tokens), proposal
            return proposal

    def end(self, tokens: Sequence[int], answer: int) -> None:
        """Keep a finished text for later requests; `tokens[answer:]` is its answer."""
        with self._shared.lock:
            self._judge(tokens)
            self._shared.history.add(tokens, answer)
            text, self._text = self._text, None
            if text is not None:
                self._shared.texts.give(text)

    def _matches(
        self, tokens: Sequence[int]
    ) -> list[tuple[Match, int, SuffixAutomaton]]:
        """Return the longest match of each place that has one, the longest first."""
        assert self._text is not None
        young, old = self._shared.history.generations
        text, result = self._text.automaton, []
        if self._text.complete:  # else the index lacks the end of the text
            result.append((text.with_successor(text.match()), TEXT, text))
        places = (
            (PREDICTION, self._prediction.automaton),
            (HISTORY, young.automaton),
            (HISTORY, old.automaton),
            (DOCUMENT, self._shared.documents),
        )
        for cursor, (place, automaton) in zip(self._cursors, places, strict=True):
            if automaton.tokens:
                result.append((cursor.move(automaton, tokens), place, automaton))
        result = [each for each in result if each[0].length]
        return sorted(result, key=lambda each: each[0].length, reverse=True)

    def _judge(self, tokens: Sequence[int]) -> None:
        """Compare the last proposal with the tokens that came since, and learn."""
        at, result = self._unjudged
        self._unjudged = 0, NOTHING_FOUND
        actual = tokens[at : at + len(result.tokens)]
        right = _agreeing(result.tokens, actual)
        self._shared.rates.note(result.buckets[: len(actual)], right)


def _agreeing(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common beginning of two lists."""
    return [*map(eq, tokens, others), False].index(False)
