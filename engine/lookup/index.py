"""What an index of tokens answers: where the end of a text was seen before.

It knows token ids only. Documents in one index are kept apart by `BREAK`, which is no
token id: no match and no continuation reaches across it.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

BREAK = -1


@dataclass(frozen=True, slots=True)
class Match:
    """An occurrence of the last tokens of a text."""

    length: int  # how many of the last tokens occur there; 0: none
    end: int  # where the occurrence ends in the index, so that `tokens[end]` followed


NO_MATCH = Match(0, 0)


class Index(Protocol):
    """Tokens in which the end of a text can be found.

    Attributes:
        tokens: the indexed tokens, int32, with `BREAK` after each document.
    """

    tokens: "array[int]"

    def append(self, token: int) -> None:
        """Index one more token, or `BREAK`."""
        ...

    def match(self) -> Match:
        """Return the earlier occurrence of the end of the indexed tokens."""
        ...

    def match_of(self, tail: Sequence[int]) -> Match:
        """Return an occurrence of the end of another text, of which this is the end."""
        ...


def append_all(index: Index, tokens: Iterable[int]) -> None:
    """Index more tokens."""
    append = index.append
    for token in tokens:
        append(token)


def continuation(tokens: "array[int]", end: int, count: int) -> list[int]:
    """Return at most `count` tokens that followed `end`, up to a `BREAK`.

    Where the tokens run out they are repeated from `end`, as they would be if the
    copied tokens were appended one by one: after a b c a b c, with the end at 3, come
    a b c a b c and so on. With a `BREAK` after each document they never run out.
    """
    found = tokens[end : end + count].tolist()
    if BREAK in found:
        return found[: found.index(BREAK)]
    while found and len(found) < count:
        found += found[: count - len(found)]
    return found
