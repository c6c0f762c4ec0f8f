"""The longest match over all places, and what followed it.

The places are the text itself, a prediction of the answer, answers of earlier requests
and documents. The longest match of them all is taken, of equally long ones the place
named first, and in a place the latest. A proposal says how probable its tokens are,
see `survival`; how many of them are worth a round is not decided here.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_speculation.engine.lookup.automaton import (
    BREAK,
    NO_MATCH,
    Match,
    SuffixAutomaton,
)
from mlx_speculation.engine.lookup.history import AnswerHistory, TextPool
from mlx_speculation.engine.lookup.places import CHUNK, Cursor, GrowingIndex
from mlx_speculation.engine.lookup.survival import PLACES, SurvivalRates

TEXT, PREDICTION, HISTORY, DOCUMENT = range(len(PLACES))


@dataclass(frozen=True, slots=True)
class Found:
    """Looked-up tokens.

    Attributes:
        tokens: they follow the text, if they are right.
        survival: of each, the chance that it and those before it are right; it ends
            where they are improbable.
        place: one of `PLACES`; "" where nothing was found.
        buckets: of each, what its chance was learnt under.
    """

    tokens: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    place: str = ""
    buckets: list[int] = field(default_factory=list)


NOTHING_FOUND = Found()


class SharedPlaces:
    """Documents, answers, indexed texts and rates, shared by the requests of a process.

    Args:
        documents: whole, without ids out of range.
        history: how many tokens of earlier answers are held at most.
        texts: how many tokens of finished texts stay indexed at most.

    Attributes:
        lock: held while a request reads or changes them, since streams may run in
            several threads. The collector may end a stream within a call of this
            thread, which then enters it again.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]] = (),
        history: int = 0,
        texts: int = 1 << 18,
    ) -> None:
        self.history, self.texts = AnswerHistory(history), TextPool(texts)
        self.rates = SurvivalRates()
        self.lock = threading.RLock()
        self.documents = SuffixAutomaton()
        for document in documents:
            for token in (*document, BREAK):
                self.documents.append(token)


class Lookup:
    """The lookup of one request.

    A draft call indexes what is new, one chunk of tokens at most, walks at most
    `LONGEST_FALL` states for each new token and place, and copies `limit` tokens of
    each place.

    Args:
        shared: what it shares with other requests.
        prediction: an expected answer.
    """

    def __init__(self, shared: SharedPlaces, prediction: Sequence[int] = ()) -> None:
        self._shared = shared
        self._text: GrowingIndex | None = None
        self._prediction = GrowingIndex([*prediction, BREAK] if prediction else ())
        self._cursors = [Cursor() for _ in range(4)]
        self._unjudged: tuple[int, Found] = 0, NOTHING_FOUND
        self._ended = False

    def read_ahead(self, tokens: Sequence[int], limit: int = CHUNK) -> bool:
        """Index at most `limit` tokens that are new.

        Returns:
            Whether all are indexed; a proposal looks in what is so far.
        """
        with self._shared.lock:
            return self._read_ahead(tokens, limit)

    def _read_ahead(self, tokens: Sequence[int], limit: int) -> bool:
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
            return self._propose(tokens, limit)

    def _propose(self, tokens: Sequence[int], limit: int) -> Found:
        self._judge(tokens)
        self._read_ahead(tokens, CHUNK)
        matches = self._matches(tokens)
        if not matches:
            return NOTHING_FOUND
        (length, state), place, automaton = max(matches, key=_length)
        result = automaton.continuation(state, limit)
        same: int | None = None
        for (_, other), _, elsewhere in matches:
            if elsewhere is not automaton:
                ahead = elsewhere.continuation(other, limit)
                agreeing = _agreeing(result, ahead)
                same = agreeing if same is None else min(same, agreeing)
        shares = automaton.shares(state, result)
        survival, buckets = self._shared.rates.survival(length, place, shares, same)
        proposal = Found(result, survival, PLACES[place], buckets)
        self._unjudged = len(tokens), proposal
        return proposal

    def end(self, tokens: Sequence[int], answer: int) -> None:
        """Leave a finished text to later requests; `tokens[answer:]` is its answer."""
        if self._ended:
            return
        self._ended = True
        with self._shared.lock:
            self._judge(tokens)
            self._shared.history.add(tokens, answer)
            text, self._text = self._text, None
            if text is not None:
                self._shared.texts.give(text)

    def _matches(
        self, tokens: Sequence[int]
    ) -> list[tuple[Match, int, SuffixAutomaton]]:
        """Return the longest match of each place that has one."""
        assert self._text is not None
        young, old = self._shared.history.generations
        text = self._text.automaton
        places = [
            (PREDICTION, self._prediction.automaton),
            (HISTORY, young.automaton),
            (HISTORY, old.automaton),
            (DOCUMENT, self._shared.documents),
        ]
        result = []
        if self._text.complete:  # else the end of the text is not in it yet
            result.append((text.with_successor(text.match()), TEXT, text))
        for cursor, (place, automaton) in zip(self._cursors, places, strict=True):
            if automaton.tokens:
                result.append((cursor.move(automaton, tokens), place, automaton))
        return [each for each in result if each[0] is not NO_MATCH]

    def _judge(self, tokens: Sequence[int]) -> None:
        """Learn from the last proposal, as far as the text has grown since."""
        at, result = self._unjudged
        self._unjudged = 0, NOTHING_FOUND
        actual = tokens[at : at + len(result.tokens)]
        right = _agreeing(result.tokens, actual)
        self._shared.rates.note(result.buckets[: len(actual)], right)


def _length(match: tuple[Match, int, SuffixAutomaton]) -> int:
    return match[0].length


def _agreeing(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens two lists have in common at their beginning."""
    for index, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return index
    return min(len(tokens), len(others))
