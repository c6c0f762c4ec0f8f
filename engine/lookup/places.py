"""Growing indexes of tokens, and the match of the end of a text in an index."""

from collections.abc import Sequence
from typing import Any

from mlx_speculation.engine.lookup.automaton import (
    NO_MATCH,
    Match,
    SuffixAutomaton,
)

# The most tokens that are indexed at once. It takes 8 ms, and other requests wait.
CHUNK = 2048
# A cursor that has to start anew in a text searches this many of its last tokens.
LONGEST_SEARCH = 64


class GrowingIndex:
    """An index of a list of tokens that grows at its end.

    An index that an interrupt has left incomplete is rebuilt from the tokens.

    Attributes:
        tokens: the list of tokens, which its owner may extend or replace.
        automaton: the index of the first tokens, or of all.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: Any = tokens
        self.automaton = SuffixAutomaton()
        self._whole = True

    def catch_up(self, limit: int = CHUNK) -> int:
        """Index at most `limit` new tokens, which takes 3 microseconds each.

        Returns:
            The number of tokens that were indexed.
        """
        if not self._whole or len(self.automaton.tokens) > len(self.tokens):
            self.automaton = SuffixAutomaton()
        append, done = self.automaton.append, len(self.automaton.tokens)
        new = self.tokens[done : done + limit]
        if new:
            self._whole = False
            for token in new:
                append(token)
            self._whole = True
        return len(new)

    @property
    def complete(self) -> bool:
        """Return whether all of the tokens are indexed."""
        return self._whole and len(self.automaton.tokens) == len(self.tokens)


class Cursor:
    """The longest match of a text's last tokens in an index that requests may share."""

    def __init__(self) -> None:
        # The index, its length, the length of the text, and the match. One tuple, so
        # that an interrupt cannot change a part of it
        self._at: tuple[SuffixAutomaton | None, int, int, Match] = (
            None,
            0,
            0,
            NO_MATCH,
        )

    def move(self, automaton: SuffixAutomaton, tokens: Sequence[int]) -> Match:
        """Follow a text to its end; return the longest match that has a successor.

        If the index has changed since the last call, or more than `LONGEST_SEARCH`
        tokens are new, only the last `LONGEST_SEARCH` tokens are searched for.
        """
        before, size, seen, match = self._at
        begin = len(tokens) - LONGEST_SEARCH
        if before is not automaton or size != len(automaton.tokens) or seen < begin:
            match, seen = NO_MATCH, max(0, begin)
        for token in tokens[seen:]:
            match = automaton.follow(match, token)
        self._at = automaton, len(automaton.tokens), len(tokens), match
        return automaton.with_successor(match)
