"""The probability that looked-up tokens are accepted, learnt from earlier proposals.

Each token of a proposal belongs to a bucket, which has an acceptance rate:

    length   the length of the match, with the proposed tokens before this one
    place    the place of the match, such as the text or a document
    share    how often this token followed the match, of all tokens that did
    others   whether the matches of other places continue with the same tokens

The probability that tokens 1 to i are all accepted is the product of their rates.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

PLACES = ("text", "prediction", "history", "document")
# The longest match of each bucket of lengths; the last bucket has no limit.
_LENGTHS = (1, 2, 3, 4, 6, 9, 15, 31)
_LENGTH_OF = [bisect_left(_LENGTHS, length) for length in range(_LENGTHS[-1] + 2)]
# Buckets of shares: unknown, 1 of 1, all of 2 or 3, all of more; then by fifths.
_SHARES = 9
# Buckets of others: 0 if no other place has a match; they agree up to here, or not.
AGREES, DIFFERS = 1, 2
# The first rate of a bucket, the tokens that it weighs, and the tokens after which the
# counts are halved.
FIRST_RATE, FIRST_WEIGHT, MOST_TOKENS = 0.6, 4.0, 1024.0


# A proposal ends at this survival: a token of lower survival is not worth its row.
LEAST_SURVIVAL = 1 / 64


class SurvivalRates:
    """The acceptance rates of all buckets."""

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
        """Return for each token the probability that it and all before are accepted.

        Args:
            length: the length of the match.
            place: the index of its place in `PLACES`.
            shares: for each token how often it followed, and how often any token did.
            same: the number of first tokens with which the matches of all other places
                continue too; None: no other place has a match.

        Returns:
            The probabilities, and the buckets of the tokens.
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
        """Learn that the first `right` tokens of a proposal were accepted.

        Tokens after the first rejected one are not counted.
        """
        hits, tries = self._hits, self._tries
        for index, each in enumerate(buckets[: right + 1]):
            if tries[each] >= MOST_TOKENS:
                tries[each] /= 2
                hits[each] /= 2
            tries[each] += 1
            hits[each] += index < right
