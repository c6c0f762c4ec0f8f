"""The texts and answers that a lookup searches, and their growing indexes."""

from array import array
from collections.abc import Sequence
from typing import Any

from mlx_speculation.engine.lookup.automaton import (
    BREAK,
    NO_MATCH,
    Match,
    SuffixAutomaton,
)

# The largest number of tokens indexed at once. Other requests wait 8 ms for it.
CHUNK = 2048
# A cursor that has to start anew looks up only so many of the text's last tokens.
LONGEST_SEARCH = 64
# The number of tokens before an answer to keep, so that its first token has a match.
BEFORE = 8


class GrowingIndex:
    """An index of a list of tokens that grows at its end.

    Attributes:
        tokens: the list of tokens, which its owner may extend or replace.
        automaton: the index of the first tokens, or of all.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: Any = tokens
        self.automaton = SuffixAutomaton()

    def catch_up(self, limit: int = CHUNK) -> int:
        """Index at most `limit` new tokens, in 3 microseconds each; return how many."""
        if len(self.automaton.tokens) > len(self.tokens):
            self.automaton = SuffixAutomaton()
        done = len(self.automaton.tokens)
        new = self.tokens[done : done + limit]
        for token in new:
            self.automaton.append(token)
        return len(new)

    @property
    def complete(self) -> bool:
        """Return whether all of the tokens are indexed."""
        return len(self.automaton.tokens) == len(self.tokens)


class Cursor:
    """The longest match of a text's last tokens in an index that requests may share."""

    def __init__(self) -> None:
        self._automaton: SuffixAutomaton | None = None
        self._size = self._seen = 0  # lengths of the index and of the text
        self._match = NO_MATCH

    def move(self, automaton: SuffixAutomaton, tokens: Sequence[int]) -> Match:
        """Follow a text to its end; return the longest match that has a successor.

        If the index has changed since the last call, or more than `LONGEST_SEARCH`
        tokens are new, only the last `LONGEST_SEARCH` tokens are searched for.
        """
        begin, size = len(tokens) - LONGEST_SEARCH, len(automaton.tokens)
        same = self._automaton is automaton and self._size == size
        if not same or self._seen < begin:
            self._match, self._seen = NO_MATCH, max(0, begin)
        for token in tokens[self._seen :]:
            self._match = automaton.follow(self._match, token)
        self._automaton, self._size, self._seen = automaton, size, len(tokens)
        return automaton.with_successor(self._match)


class AnswerHistory:
    """Keeps answers, each with a few tokens before it, and drops the oldest.

    Prompts are not kept: an agent's prompt repeats most of the agent's last prompt.
    A full young generation replaces the old one. Thus at least half of the limit is
    kept, and no token is indexed twice.

    Args:
        limit: the largest number of tokens to keep, with a `BREAK` for each answer.

    Attributes:
        generations: the young one and the old one, each of at most half the limit.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self.generations = GrowingIndex(array("i")), GrowingIndex(array("i"))

    def add(self, tokens: Sequence[int], answer: int) -> None:
        """Keep `tokens[answer:]`, or its last tokens; requests index it later."""
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
    """Indexes of finished texts, for a later turn that continues one of them.

    Args:
        limit: the largest total number of indexed tokens; the oldest texts are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._indexes: list[GrowingIndex] = []  # the newest index first

    def take(self, tokens: Sequence[int]) -> GrowingIndex:
        """Remove the index of the longest text with which these tokens begin.

        Returns:
            The index; an empty one if no text fits.
        """
        for index in sorted(self._indexes, key=_size, reverse=True):
            if _begins(tokens, index.automaton.tokens):
                self._indexes.remove(index)
                return index
        return GrowingIndex()

    def give(self, index: GrowingIndex) -> None:
        """Keep the index of a finished text."""
        self._indexes.insert(0, index)
        while sum(map(_size, self._indexes)) > self._limit:
            self._indexes.pop()


def _size(index: GrowingIndex) -> int:
    return len(index.automaton.tokens)


def _begins(tokens: Sequence[int], kept: "array[int]") -> bool:
    """Return whether `tokens` begin with `kept`; compare the end of `kept` first."""
    size, near = len(kept), max(0, len(kept) - 64)
    if not 0 < size <= len(tokens) or array("i", tokens[near:size]) != kept[near:]:
        return False
    return array("i", tokens[:near]) == kept[:near]
