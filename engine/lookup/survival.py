"""The probability that drafted tokens are accepted, learnt from earlier drafts.

Each token of a draft belongs to a bucket, which has an acceptance rate. The survival of
token i, the probability that tokens 1 to i are all accepted, is the product of their
rates. For a model, the bucket is the token's position; for a lookup, it is made of

    length   the length of the match, plus the number of proposed tokens before this one
    place    the place of the match, such as the text or a document
    share    how often this token followed the match, over how often any token did
    others   whether the matches of other places continue with the same tokens
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

PLACES = ("text", "prediction", "history", "document")
# The longest match of each bucket of lengths; the last bucket has no limit.
_LENGTHS = (1, 2, 3, 4, 6, 9, 15, 31)
# Buckets of shares: unknown; 1/1; 2/2 and 3/3; 4/4 and so on; five for shares below 1.
_SHARES = 9
LEAST_SURVIVAL = 1 / 64  # tokens behind one of lower survival are left out


class AcceptanceRates:
    """Exponential averages of acceptance by bucket; a bucket can be a position."""

    def __init__(
        self,
        size: int = 32,  # the number of buckets
        first: float = 0.7,  # the first rate of a bucket
        weight: float = 5.0,  # the first rate weighs as much as so many tokens
        window: float = 40.0,  # a rate is an average over about so many tokens
    ) -> None:
        self._hits = array("d", [first * weight]) * size
        self._tries = array("d", [weight]) * size
        self._keep = 1 - 1 / window

    def survival(self, buckets: Iterable[int]) -> list[float]:
        """Return the survival of the first tokens; ends at an improbable one."""
        chance, result = 1.0, list[float]()
        for bucket in buckets:
            chance *= self._hits[bucket] / self._tries[bucket]
            result.append(chance)
            if chance < LEAST_SURVIVAL:
                break
        return result

    def note(self, buckets: Sequence[int], right: float) -> None:
        """Learn that `right` tokens were accepted, the next not; n - 0.5: only n."""
        for index, bucket in enumerate(buckets[: int(right) + 1]):
            self._tries[bucket] = self._tries[bucket] * self._keep + 1
            self._hits[bucket] = self._hits[bucket] * self._keep + (index < right)


def lookup_rates() -> AcceptanceRates:
    """Return rates for `lookup_buckets`."""
    size = (len(_LENGTHS) + 1) * len(PLACES) * _SHARES * 3
    return AcceptanceRates(size, 0.6, 4.0, 768.0)


def lookup_buckets(
    length: int, place: int, shares: Iterable[tuple[int, int]], same: int | None
) -> Iterator[int]:
    """Yield the bucket of each token behind a match, see `SuffixAutomaton.shares`.

    The match is in `PLACES[place]`. The matches of all other places continue with the
    first `same` tokens too; None: no other place has a match.
    """
    for index, (count, total) in enumerate(shares):
        if count < total:
            share = 4 + min(4, 5 * count // total)
        else:
            share = min(total, 2) if total < 4 else 3
        row = bisect_left(_LENGTHS, length + index) * len(PLACES) + place
        bucket = (row * _SHARES + share) * 3
        if same is not None:
            bucket += 1 if index < same else 2
        yield bucket
