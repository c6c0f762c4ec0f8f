"""All substrings of a growing text, in memory and time linear in its length.

The suffix automaton of Blumer et al. (1985), built online. A state stands for the
substrings that end at the same places; its longest one has `length` tokens, and the
link leads to the state of the next shorter suffix. The longest suffix of the text that
occurred before is that of the link of the last state, so it costs nothing to find.

    text a b c a b      the last state's link is the state of "a b"
    match               length 2, end 2: c followed

Each state also holds the end of its latest occurrence that has a successor. A new
token moves it for the states on the path of links from the last one, of which there
are few in text, but as many as tokens in a long run of one token. So the walk is cut:
states further up keep an earlier, equally true occurrence.
"""

from array import array
from collections.abc import Sequence

from mlx_speculation.engine.lookup.index import BREAK, NO_MATCH, Match

# How many states get a new end with a token.
LONGEST_WALK = 32
# A state without a transition has no first token. It differs from every id and BREAK.
_NOTHING = -2


class SuffixAutomaton:
    """Finds the longest suffix that occurred before, and its latest occurrence.

    A token adds at most 2 states of 20 bytes and, where a state goes on in several
    ways, entries of dictionaries.
    """

    def __init__(self, *, walk: int = LONGEST_WALK) -> None:
        self.tokens = array("i")
        self._walk = walk
        self._last = 0
        # One value per state; 0 is the root, the empty string.
        self._length = array("i", [0])
        self._link = array("i", [-1])
        self._end = array("i", [0])  # 0: no occurrence has a successor
        # Most states have one transition. It is held here, further ones in _more.
        self._token = array("i", [_NOTHING])
        self._target = array("i", [0])
        self._more: dict[int, dict[int, int]] = {}

    def append(self, token: int) -> None:
        """Index one more token, or `BREAK`. Amortized constant time."""
        if token != BREAK:
            self._note_end()
        self.tokens.append(token)
        self._extend(token)

    def match(self) -> Match:
        """Return the latest earlier occurrence of the longest suffix that has one."""
        state = self._link[self._last]
        return Match(self._length[state], self._end[state]) if state > 0 else NO_MATCH

    def match_of(self, tail: Sequence[int]) -> Match:
        """Return the longest suffix of `tail` with an occurrence that has a successor.

        Time linear in the tail's length.
        """
        state = length = 0
        for token in tail:
            following = self._next(state, token)
            while following < 0 and state:
                state = self._link[state]
                length = self._length[state]
                following = self._next(state, token)
            if following >= 0:
                state, length = following, length + 1
        while state and not self._end[state]:
            state = self._link[state]
            length = self._length[state]
        return Match(length, self._end[state]) if state else NO_MATCH

    def _note_end(self) -> None:
        """Let the last state and those above it end here, before a token follows."""
        here, state, link, end = len(self.tokens), self._last, self._link, self._end
        for _ in range(self._walk):
            if state <= 0:
                break
            end[state] = here
            state = link[state]

    def _extend(self, token: int) -> None:
        """Add the state of the whole text with its new last token."""
        link, length = self._link, self._length
        state = self._last
        new = self._last = self._add(length[state] + 1)
        while state >= 0 and (following := self._next(state, token)) < 0:
            self._set(state, token, new)
            state = link[state]
        if state < 0:
            link[new] = 0
        elif length[following] == length[state] + 1:
            link[new] = following
        else:
            clone = self._clone(following, length[state] + 1)
            while state >= 0 and self._next(state, token) == following:
                self._set(state, token, clone)
                state = link[state]
            link[new] = link[following] = clone

    def _add(self, length: int) -> int:
        self._length.append(length)
        self._link.append(0)
        self._end.append(0)
        self._token.append(_NOTHING)
        self._target.append(0)
        return len(self._length) - 1

    def _clone(self, state: int, length: int) -> int:
        """Add a state for those substrings of another that end elsewhere too."""
        clone = self._add(length)
        self._link[clone] = self._link[state]
        self._end[clone] = self._end[state]
        self._token[clone] = self._token[state]
        self._target[clone] = self._target[state]
        if state in self._more:
            self._more[clone] = self._more[state].copy()
        return clone

    def _next(self, state: int, token: int) -> int:
        """Return where a token leads from a state; -1: nowhere."""
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return -1 if more is None else more.get(token, -1)

    def _set(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (token, _NOTHING):
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target
