"""Where the last few tokens were seen before: one dictionary."""

from array import array
from collections.abc import Sequence

from mlx_speculation.engine.lookup.index import BREAK, NO_MATCH, Match

# Matches are not followed further back than this.
LONGEST_MATCH = 64


class NgramIndex:
    """Finds the latest occurrence of the last n tokens that has a successor.

    Simpler than a suffix automaton and a little faster, but it takes the latest of all
    occurrences of n tokens, not of the longest suffix.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self.tokens = array("i")
        self._ends: dict[bytes, int] = {}

    def append(self, token: int) -> None:
        """Index one more token, or `BREAK`."""
        tokens = self.tokens
        if token != BREAK and len(tokens) >= self._n:
            self._ends[tokens[-self._n :].tobytes()] = len(tokens)
        tokens.append(token)

    def match(self) -> Match:
        """Return the latest earlier occurrence of the last n tokens."""
        return self.match_of(self.tokens[-LONGEST_MATCH:])

    def match_of(self, tail: Sequence[int]) -> Match:
        """Return the latest occurrence of the last n tokens of `tail`.

        Its length counts on backwards as far as the tokens agree.
        """
        length, tokens = self._n, self.tokens
        if len(tail) < length:
            return NO_MATCH
        end = self._ends.get(array("i", tail[-length:]).tobytes())
        if end is None:
            return NO_MATCH
        longest = min(len(tail), end)
        while length < longest and tail[-1 - length] == tokens[end - 1 - length]:
            length += 1
        return Match(length, end)
