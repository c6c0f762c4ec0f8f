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
from collections.abc import Iterable, Sequence

PLACES = ("text", "prediction", "history", "document")
# The longest match of each bucket of lengths but the last.
_LENGTHS = (1, 2, 3, 4, 6, 9, 15, 31)
_LENGTH_OF = [bisect_left(_LENGTHS, length) for length in range(_LENGTHS[-1] + 2)]
# Shares: unknown, 1 of 1, all of up to 3, all of more; then by fifths.
_SHARES = 9
# Others: 0: none has a match; they agree up to here, or they do not.
AGREES, DIFFERS = 1, 2
# A bucket begins with this rate, which counts for so many tokens, and forgets beyond.
FIRST_RATE, FIRST_WEIGHT, MOST_TOKENS = 0.6, 4.0, 1024.0


# A proposal ends where it is less probable than this: no row is so cheap.
LEAST_SURVIVAL = 1 / 64


class SurvivalRates:
    """The rates of all buckets, of one pair of target and texts."""

    def __init__(self) -> None:
        size = (len(_LENGTHS) + 1) * len(PLACES) * _SHARES * 3
        self._hits = array("d", [FIRST_RATE * FIRST_WEIGHT]) * size
        self._tries = array("d", [FIRST_WEIGHT]) * size

    def survival(
        self,
        length: int,
        place: int,
        shares: Iterable[tuple[int, int]],
        same: int | None,
    ) -> tuple[list[float], list[int]]:
        """Return how probable it is that each token and those before it are right.

        Args:
            length: of the match.
            place: where it is.
            shares: of each token, how often it followed there, of how many that did.
            same: so many follow in the other places too; None: there is no other.

        Returns:
            The chances, and the buckets of the tokens.
        """
        hits, tries, longest = self._hits, self._tries, len(_LENGTH_OF) - 1
        chances, buckets, chance = [], [], 1.0
        for index, (count, total) in enumerate(shares):
            if count < total:
                row = 4 + min(4, 5 * count // total)
            else:
                row = min(total, 2) if total < 4 else 3
            by_length = _LENGTH_OF[min(length + index, longest)]
            each = ((by_length * len(PLACES) + place) * _SHARES + row) * 3
            if same is not None:
                each += AGREES if index < same else DIFFERS
            chance *= hits[each] / tries[each]
            chances.append(chance)
            buckets.append(each)
            if chance < LEAST_SURVIVAL:
                break
        return chances, buckets

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
