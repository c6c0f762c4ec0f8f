"""All substrings of a growing text, in memory and time linear in its length.

The suffix automaton of Blumer et al. (1985), built online. A state stands for the
substrings that end at the same places; its longest one has `length` tokens, and the
link leads to the state of the next shorter suffix. The longest suffix of the text that
occurred before is that of the link of the last state, so it costs nothing to find.

    text a b c a b      the last state's link is the state of "a b"
    match               length 2, end 2: c followed

Each state also holds the end of its latest occurrence that has a successor, and how
many occurrences have one: how often a token followed, over how often anything did, is
the share of a continuation. A new token moves both for the states on the path of links
from the last one, of which there are few in text, but as many as tokens in a long run
of one token. So the walk is cut: states further up keep an earlier, equally true
occurrence, and count too few.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

BREAK = -1  # keeps documents apart: no match and no continuation reaches across it
# How many states get a new end and a count with a token.
LONGEST_WALK = 32
# How many states a search walks up.
LONGEST_FALL = 256
# A state without a transition has no first token. It differs from every id and BREAK.
_NOTHING = -2


class Match(NamedTuple):
    """The longest suffix of a text that occurs in an index.

    Attributes:
        length: its tokens; 0: there is none.
        state: the automaton's state of it; 0 is the root, the empty string.
    """

    length: int
    state: int


NO_MATCH = Match(0, 0)


class SuffixAutomaton:
    """Finds the longest suffix that occurred before, and what followed it.

    A token adds at most 2 states of 24 bytes and, where a state goes on in several
    ways, entries of dictionaries.

    Attributes:
        tokens: the indexed tokens, int32, with `BREAK` after each document.
    """

    def __init__(self, *, walk: int = LONGEST_WALK) -> None:
        self.tokens = array("i")
        self._walk = walk
        self._last = 0
        # One value per state; 0 is the root, the empty string.
        self._length = array("i", [0])
        self._link = array("i", [-1])
        self._end = array("i", [0])  # 0: no occurrence has a successor
        self._count = array("i", [0])  # occurrences that have one, or a BREAK
        # Most states have one transition. It is held here, further ones in _more.
        self._token = array("i", [_NOTHING])
        self._target = array("i", [0])
        self._more: dict[int, dict[int, int]] = {}

    def append(self, token: int) -> None:
        """Index one more token, or `BREAK`. Amortized constant time."""
        self._note_end(goes_on=token != BREAK)
        self.tokens.append(token)
        self._extend(token)

    def match(self) -> Match:
        """Return the longest suffix of the indexed tokens that occurred before."""
        state = self._link[self._last]
        return Match(self._length[state], state) if state > 0 else NO_MATCH

    def follow(self, match: Match, token: int) -> Match:
        """Return the match of a text's end, given that of the text without it.

        Legal while the index stays as it is. Amortized constant time: what is walked
        up was walked down before. Beyond `LONGEST_FALL` states there is no match.
        """
        length, state = match
        for _ in range(LONGEST_FALL):
            target = self._next(state, token)
            if target >= 0:
                return Match(length + 1, target)
            if not state:
                break
            state = self._link[state]
            length = self._length[state]
        return NO_MATCH

    def with_successor(self, match: Match) -> Match:
        """Return the longest suffix of a match with an occurrence that goes on."""
        length, state = match
        for _ in range(LONGEST_FALL):
            if not state or self._end[state]:
                break
            state = self._link[state]
            length = self._length[state]
        return Match(length, state) if self._end[state] else NO_MATCH

    def continuation(self, state: int, count: int) -> list[int]:
        """Return at most `count` tokens that followed the latest occurrence of a state.

        They end before a `BREAK`. Where the tokens run out they are repeated, as they
        would be if the copied tokens were appended one by one: after a b c a b c, with
        the end at 3, come a b c a b c and so on. With a `BREAK` after each document
        they never run out.
        """
        end = self._end[state]
        result = self.tokens[end : end + count].tolist()
        if BREAK in result:
            return result[: result.index(BREAK)]
        while result and len(result) < count:
            result += result[: count - len(result)]
        return result

    def shares(self, state: int, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield how often each token followed, and how often anything did there.

        Each is counted behind those before it. Behind what never occurred it is 0 of 0.
        """
        count = self._count
        total = count[state]
        for token in tokens:
            state = self._next(state, token) if state >= 0 else -1
            if state < 0:
                yield 0, 0
                continue
            # The occurrence at the very end of the index is not counted yet.
            all_counts = max(1, count[state])
            yield all_counts, max(total, all_counts)
            total = count[state]

    def _note_end(self, *, goes_on: bool) -> None:
        """Let the last state and those above it end here, before a token follows."""
        here, state, link = len(self.tokens), self._last, self._link
        end, count = self._end, self._count
        for _ in range(self._walk):
            if state <= 0:
                break
            if goes_on:
                end[state] = here
            count[state] += 1
            state = link[state]

    def _extend(self, token: int) -> None:
        """Add the state of the whole text with its new last token."""
        link, length = self._link, self._length
        state = self._last
        new = self._last = self._add(length[state] + 1)
        while state >= 0 and (target := self._next(state, token)) < 0:
            self._set(state, token, new)
            state = link[state]
        if state < 0:
            link[new] = 0
        elif length[target] == length[state] + 1:
            link[new] = target
        else:
            clone = self._clone(target, length[state] + 1)
            while state >= 0 and self._next(state, token) == target:
                self._set(state, token, clone)
                state = link[state]
            link[new] = link[target] = clone

    def _add(self, length: int) -> int:
        self._length.append(length)
        self._link.append(0)
        self._end.append(0)
        self._count.append(0)
        self._token.append(_NOTHING)
        self._target.append(0)
        return len(self._length) - 1

    def _clone(self, state: int, length: int) -> int:
        """Add a state for those substrings of another that end elsewhere too."""
        clone = self._add(length)
        self._link[clone] = self._link[state]
        self._end[clone] = self._end[state]
        self._count[clone] = self._count[state]
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
