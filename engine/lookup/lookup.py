"""The longest match over all places, and the tokens that followed it.

The places are the text itself, a prediction of the answer, answers of earlier requests
and documents. The longest match wins; among equally long ones the place named first
wins, and within a place the latest match.
"""

import threading
from array import array
from collections.abc import Iterator, Sequence
from operator import eq
from typing import Any, NamedTuple

from mlx_speculation.engine.lookup.automaton import BREAK, Match, SuffixAutomaton
from mlx_speculation.engine.lookup.survival import PLACES, lookup_buckets, lookup_rates

Tokens = Sequence[int]
TEXT, PREDICTION, HISTORY, DOCUMENT = range(len(PLACES))
TEXTS = 1 << 18  # the most tokens of finished texts that stay indexed
CHUNK = 2048  # the most tokens indexed at once, in 8 ms; other requests wait meanwhile
LONGEST_SEARCH = 64  # the most tokens that `Cursor.move` follows: the last of the text
BEFORE = 8  # tokens to keep before an answer, so that its first token has a match


class GrowingIndex:
    """An index of a list of tokens that grows at its end."""

    def __init__(self, tokens: Tokens = ()) -> None:
        self.tokens: Any = tokens  # its owner may extend or replace it
        self.automaton = SuffixAutomaton()  # of the first tokens, or of all

    def catch_up(self, limit: int = CHUNK) -> int:
        """Index at most `limit` new tokens, in 3 microseconds each; return how many."""
        if self.done > len(self.tokens):
            self.automaton = SuffixAutomaton()
        new = self.tokens[self.done : self.done + limit]
        try:
            for token in new:
                self.automaton.append(token)
        except BaseException:
            self.automaton = SuffixAutomaton()  # an interrupted `append` breaks it
            raise
        return len(new)

    @property
    def done(self) -> int:
        """The number of indexed tokens."""
        return len(self.automaton.tokens)

    @property
    def complete(self) -> bool:
        """Return whether all of the tokens are indexed."""
        return self.done == len(self.tokens)


class Cursor:
    """The longest match of a text's last tokens in an index."""

    def __init__(self) -> None:
        self._automaton: SuffixAutomaton | None = None
        self._size = self._seen = 0  # lengths of the index and of the text
        self._match = Match()

    def move(self, automaton: SuffixAutomaton, tokens: Tokens) -> Match:
        """Follow a text to its end; return the longest match that has a successor."""
        begin, size = len(tokens) - LONGEST_SEARCH, len(automaton.tokens)
        same = self._automaton is automaton and self._size == size
        if not same or self._seen < begin:
            self._match, self._seen = Match(), max(0, begin)
        for token in tokens[self._seen :]:
            self._match = automaton.follow(self._match, token)
        self._automaton, self._size, self._seen = automaton, size, len(tokens)
        return automaton.with_successor(self._match)


class AnswerHistory:
    """Keeps answers, each with a few tokens before it, and drops the oldest.

    Prompts are not kept: the next prompt of an agent repeats them and is indexed too.
    When the younger of two indexes is full, it replaces the older; a new one begins.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2  # the most tokens of an index
        self.generations = GrowingIndex(array("i")), GrowingIndex(array("i"))

    def add(self, tokens: Tokens, answer: int) -> None:
        """Keep `tokens[answer:]`, or its end if it is long; requests index it later."""
        if self._half < 2 or answer >= len(tokens):
            return  # there is no room, or no answer
        document = array("i", [*tokens[max(0, answer - BEFORE) :], BREAK])
        document = document[-self._half :]
        young, _ = self.generations
        if len(young.tokens) + len(document) > self._half:
            self.generations = GrowingIndex(document), young
        else:
            young.tokens += document


class TextPool:
    """Indexes of finished texts, for a later turn that continues one of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # of all indexed tokens; the oldest texts are dropped
        self._indexes: list[GrowingIndex] = []  # the newest index first

    def take(self, tokens: Tokens) -> GrowingIndex:
        """Take out the index of the longest text `tokens` continue, or make one."""
        for index in sorted(self._indexes, key=lambda each: -each.done):
            kept, near = index.automaton.tokens, max(0, index.done - 64)
            # The end first: it differs most often
            parts = slice(near, index.done), slice(near)
            same = (array("i", tokens[part]) == kept[part] for part in parts)
            if 0 < index.done <= len(tokens) and all(same):
                self._indexes = [each for each in self._indexes if each is not index]
                return index
        return GrowingIndex()

    def give(self, index: GrowingIndex) -> None:
        """Keep the index of a finished text."""
        indexes = [index, *self._indexes]
        while sum(each.done for each in indexes) > self._limit:
            indexes.pop()
        self._indexes = indexes


class Found(NamedTuple):
    """Looked-up tokens."""

    tokens: list[int]  # the proposed continuation of the text
    survival: list[float]  # of the first tokens, ends at an improbable one
    place: str  # one of `PLACES`; "" if there is no match
    buckets: list[int]  # of each token of `survival`, see the module `survival`


NOTHING_FOUND = Found([], [], "", [])


class SharedPlaces:
    """Documents, answers, indexed texts and rates, which all requests share."""

    def __init__(self, documents: Sequence[Tokens] = (), history: int = 0) -> None:
        self.history, self.texts = AnswerHistory(history), TextPool(TEXTS)
        self.rates = lookup_rates()
        # Held while a request uses these, since streams may run in several threads.
        # Re-entrant: garbage collection may end a stream while its thread has the lock
        self.lock = threading.RLock()
        self.documents = SuffixAutomaton()
        for document in documents:
            for token in (*document, BREAK):
                self.documents.append(token)


class Lookup:
    """The lookup of one request, with the tokens of an expected answer."""

    def __init__(self, shared: SharedPlaces, prediction: Tokens = ()) -> None:
        self._shared = shared
        self._text: GrowingIndex | None = None
        self._prediction = GrowingIndex([*prediction, BREAK] if prediction else ())
        places = PREDICTION, HISTORY, HISTORY, DOCUMENT
        self._cursors = [(place, Cursor()) for place in places]
        self._unjudged = 0, NOTHING_FOUND  # text length before a proposal; the proposal

    def read_ahead(self, tokens: Tokens, limit: int = CHUNK) -> bool:
        """Index at most `limit` new tokens; return whether all tokens are indexed."""
        with self._shared.lock:
            if self._text is None:
                self._text = self._shared.texts.take(tokens)
            self._text.tokens = tokens
            growing = self._text, self._prediction, *self._shared.history.generations
            for index in growing:
                limit -= index.catch_up(limit)
            return all(index.complete for index in growing)

    def propose(self, tokens: Tokens, limit: int) -> Found:
        """Return at most `limit` tokens that followed the longest match."""
        with self._shared.lock:
            self._judge(tokens)
            self.read_ahead(tokens)
            matches = [each for each in self._matches(tokens) if each[0].length]
            if not matches:
                return NOTHING_FOUND
            matches.sort(key=lambda each: each[0].length, reverse=True)
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

    def end(self, tokens: Tokens, answer: int) -> None:
        """Keep a finished text for later requests; `tokens[answer:]` is its answer."""
        with self._shared.lock:
            self._judge(tokens)
            self._shared.history.add(tokens, answer)
            text, self._text = self._text, None
            if text is not None:
                self._shared.texts.give(text)

    def _matches(self, tokens: Tokens) -> Iterator[tuple[Match, int, SuffixAutomaton]]:
        """Yield the longest match of each place, with the place and its index."""
        assert self._text is not None
        text = self._text.automaton
        if self._text.complete:  # else the index lacks the end of the text
            yield text.with_successor(text.match()), TEXT, text
        growing = self._prediction, *self._shared.history.generations
        others = [*(each.automaton for each in growing), self._shared.documents]
        for (place, cursor), other in zip(self._cursors, others, strict=True):
            if other.tokens:
                yield cursor.move(other, tokens), place, other

    def _judge(self, tokens: Tokens) -> None:
        """Compare the last proposal with the tokens that came since, and learn."""
        at, result = self._unjudged
        self._unjudged = 0, NOTHING_FOUND
        actual = tokens[at : at + len(result.tokens)]
        right = _agreeing(result.tokens, actual)
        self._shared.rates.note(result.buckets[: len(actual)], right)


def _agreeing(tokens: Tokens, others: Tokens) -> int:
    """Return the length of the common beginning of two lists."""
    return [*map(eq, tokens, others), False].index(False)
