"""The tokens of earlier requests, for drafts that look them up."""

from collections.abc import Callable, Sequence

from mlx_speculation.engine.lookup.index import BREAK, Index, append_all

# Of a request that begins like the one before, this much of the beginning is indexed
# again, so that matches reach from what is old into what is new.
_OVERLAP = 64


class EarlierRequests:
    """Indexes whole requests, and forgets the oldest beyond a limit.

    There are two indexes, each of half the limit: when the young one is full it
    becomes the old one, and the old one is dropped. So between half and all of the
    limit is known, and nothing is ever indexed twice.

    Args:
        make_index: makes an empty index.
        limit: how many tokens are held at most, one more for each request counted.
    """

    def __init__(self, make_index: Callable[[], Index], limit: int) -> None:
        self._make_index = make_index
        self._half = limit // 2
        self._young, self._old = make_index(), make_index()
        self._last: list[int] = []

    @property
    def indexes(self) -> tuple[Index, Index]:
        """What is known, the younger requests first."""
        return self._young, self._old

    def add(self, tokens: Sequence[int]) -> None:
        """Index a request; of one that is too long, the last tokens.

        A request that begins with the whole request before, as the next turn of a
        chat does, is indexed from its new tokens on.
        """
        if self._half < 2:
            return  # nothing could follow anything
        start = 0
        if self._last == tokens[: len(self._last)]:
            start = max(0, len(self._last) - _OVERLAP)
        self._last = list(tokens)
        document = [*tokens[start:], BREAK][-self._half :]
        young = self._young
        if len(young.tokens) + len(document) > self._half:
            self._old, young = young, self._make_index()
        self._young = self._make_index()  # an interrupt leaves no half-made index
        append_all(young, document)
        self._young = young
