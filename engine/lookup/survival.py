"""The chance that looked-up tokens are right, learnt from those of texts so far.

Each token of a proposal falls into a bucket, whose rate is learnt:

    length   of the match that it goes on with, that of the tokens before it included
    place    where the match is
    share    how often it was this token that followed there
    others   whether the other places with a match go on with the same tokens

The chance that tokens 1 to i are all right is the product of their rates.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

PLACES = ("text", "prediction", "history", "document")
# The longest match of each bucket of lengths but the last.
_LENGTHS = (1, 2, 3, 4, 6, 9, 15, 31)
_LENGTH_OF = [bisect_left(_LENGTHS, length) for length in range(_LENGTHS[-1] + 2)]
# Shares: unknown, 1 of 1, all of up to 3, all of more; then by fifths.
_SHARES = 9
# Others: none has a match, they agree up to here, they do not.
ALONE, AGREES, DIFFERS = range(3)
# A bucket begins with this rate, which counts for so many tokens, and forgets beyond.
FIRST_RATE, FIRST_WEIGHT, MOST_TOKENS = 0.6, 4.0, 1024.0


def bucket(length: int, place: int, share: tuple[int, int], others: int) -> int:
    """Return the bucket of a token, given its match and how often it followed there."""
    count, total = share
    if count == total:
        own = min(total, 2) if total < 4 else 3
    else:
        own = 4 + min(4, 5 * count // total)
    by_length = _LENGTH_OF[min(length, len(_LENGTH_OF) - 1)]
    return ((by_length * len(PLACES) + place) * _SHARES + own) * 3 + others


class SurvivalRates:
    """The rates of all buckets, of one pair of target and texts."""

    def __init__(self) -> None:
        size = (len(_LENGTHS) + 1) * len(PLACES) * _SHARES * 3
        self._hits = array("d", [FIRST_RATE * FIRST_WEIGHT]) * size
        self._tries = array("d", [FIRST_WEIGHT]) * size

    def survival(self, buckets: Sequence[int]) -> list[float]:
        """Return the chance, for each token, that it and those before are right."""
        hits, tries = self._hits, self._tries
        return [*accumulate([hits[each] / tries[each] for each in buckets], mul)]

    def note(self, buckets: Sequence[int], right: int) -> None:
        """Learn from tokens that are all judged: of these so many were right.

        Tokens behind the first wrong one tell nothing.
        """
        hits, tries = self._hits, self._tries
        for index, each in enumerate(buckets[: right + 1]):
            if tries[each] >= MOST_TOKENS:
                tries[each] /= 2
                hits[each] /= 2
            tries[each] += 1
            hits[each] += index < right
