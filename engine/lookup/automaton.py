"""An index of all substrings of a growing text, in linear memory and time.

This is the suffix automaton of Blumer et al. (1985), built online. A state stands for
all substrings that end at the same positions; the longest of them has `length` tokens.
The link of a state leads to the state of its longest suffix that also ends elsewhere.
Thus the link of the last state leads to the longest suffix that occurred before.

    text a b c a b      the last state's link is the state of "a b"
    match               length 2, end 2: c followed

A new token changes the end and the count of each state on the path of links from the
last state. In a long run of one token this path is as long as the run, so it is cut.
States beyond the cut keep an earlier end, which is valid, and a count that is too low.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

BREAK = -1  # separates documents; no token id equals it
LONGEST_WALK = 32  # the most states whose end and count a new token changes
LONGEST_FALL = 256  # the most links that a search follows for a token
_NOTHING = -2  # the `_token` of a state without transitions; no id, and not BREAK


class Match(NamedTuple):
    """The longest suffix of a text that occurs in an index."""

    length: int = 0  # its number of tokens; 0: there is no match
    state: int = 0  # its state in the automaton; 0 is the root, the empty string


NO_MATCH = Match()


class SuffixAutomaton:
    """Finds the longest suffix that occurred before, and the tokens after it."""

    def __init__(self, *, walk: int = LONGEST_WALK) -> None:
        self.tokens = array("i")  # the indexed ones, with `BREAK` after each document
        self._walk = walk
        self._last = 0
        # One value per state; 0 is the root.
        self._length = array("i", [0])
        self._link = array("i", [-1])
        self._end = array("i", [0])  # end of its latest occurrence before a token, or 0
        self._count = array("i", [0])  # occurrences that a token or BREAK follows
        # The first transition of each state, mostly the only one; others are in _more.
        self._token = array("i", [_NOTHING])
        self._target = array("i", [0])
        self._more: dict[int, dict[int, int]] = {}

    def append(self, token: int) -> None:
        """Index one more token, or `BREAK`. Amortized constant time."""
        here, state, link = len(self.tokens), self._last, self._link
        end, count = self._end, self._count
        # Each suffix of the text now has a successor
        for _ in range(self._walk):
            if state <= 0:
                break
            if token != BREAK:
                end[state] = here
            count[state] += 1
            state = link[state]
        self.tokens.append(token)
        # The state of the whole text with its new last token
        state, new, length = self._last, len(self._length), self._length
        self._last = new
        length.append(length[state] + 1)
        link.append(0)
        end.append(0)
        count.append(0)
        self._token.append(_NOTHING)
        self._target.append(0)
        while state >= 0 and (target := self._next(state, token)) < 0:
            self._set(state, token, new)
            state = link[state]
        if state < 0:
            return
        if length[target] != length[state] + 1:
            old, target = target, self._clone(target, length[state] + 1)
            while state >= 0 and self._next(state, token) == old:
                self._set(state, token, target)
                state = link[state]
            link[old] = target
        link[new] = target

    def match(self) -> Match:
        """Return the longest suffix of the indexed tokens that occurred before."""
        state = self._link[self._last]
        return Match(self._length[state], state) if state > 0 else NO_MATCH

    def follow(self, match: Match, token: int) -> Match:
        """Return the match after one more token, given the match before that token.

        The index must not have changed in between. Amortized constant time.
        """
        for length, state in self._suffixes(match):
            target = self._next(state, token)
            if target >= 0:
                return Match(length + 1, target)
        return NO_MATCH

    def with_successor(self, match: Match) -> Match:
        """Return the longest suffix of a match after which a token has occurred."""
        for length, state in self._suffixes(match):
            if self._end[state]:
                return Match(length, state)
        return NO_MATCH

    def continuation(self, state: int, count: int) -> list[int]:
        """Return at most `count` tokens that followed the latest occurrence of a state.

        They end before a `BREAK`. If the indexed tokens end first, the result is
        repeated: with a b c a b c indexed, a state that ends at 3 gives a b c a b c ...
        """
        end = self._end[state]
        result = self.tokens[end : end + count].tolist()
        if BREAK in result:
            return result[: result.index(BREAK)]
        while result and len(result) < count:
            result += result[: count - len(result)]
        return result

    def shares(self, state: int, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield how often each token came next, from `state` on, and how often any did.

        Both numbers are 0 from the first token on that never followed.
        """
        for index, token in enumerate(tokens):
            total, state = self._count[state], self._next(state, token)
            if state < 0:
                yield from [(0, 0)] * (len(tokens) - index)
                return
            # `_count` is 0 if the only occurrence ends the index
            count = max(1, self._count[state])
            yield count, max(total, count)

    def _suffixes(self, match: Match) -> Iterator[tuple[int, int]]:
        """Yield a match, then its suffixes that occur more often, the longest first."""
        length, state = match
        for _ in range(LONGEST_FALL):
            yield length, state
            if not state:
                return
            state = self._link[state]
            length = self._length[state]

    def _clone(self, state: int, length: int) -> int:
        """Add a state for those substrings of a state that now end elsewhere too."""
        clone = len(self._length)
        self._length.append(length)
        for each in (self._link, self._end, self._count, self._token, self._target):
            each.append(each[state])
        if state in self._more:
            self._more[clone] = self._more[state].copy()
        return clone

    def _next(self, state: int, token: int) -> int:
        """Return the state to which a token leads from a state; -1: none."""
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def _set(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (token, _NOTHING):
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target
