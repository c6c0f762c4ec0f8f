"""Growing indexes of tokens, and the match of the end of a text in an index."""

from collections.abc import Sequence
from typing import Any

from mlx_speculation.engine.lookup.automaton import (
    NO_MATCH,
    Match,
    SuffixAutomaton,
)

# The largest number of tokens indexed at once. Other requests wait 8 ms for it.
CHUNK = 2048
# A cursor that has to start anew looks up only so many of the text's last tokens.
LONGEST_SEARCH = 64


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
        """Index at most `limit` new tokens, which takes 3 microseconds each.

        Returns:
            The number of tokens that were indexed.
        """
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
