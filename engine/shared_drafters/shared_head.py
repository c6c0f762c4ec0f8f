"""A head that drafts for many requests at once, in one forward per token or block.

The head reads hidden states of the target: a round leaves the states of the positions
that each request has committed. A draft first writes the new positions of all requests
to the head's caches; the drafted chains follow them. One request with k = 3 drafted
tokens:

    known before        t0 t1 t2 t3           caches hold 0 1; the state of position 2
                                              (of t2, paired with t3) is not read yet
    fed                 position 2 | d1 | d2  d3 is chosen last and not fed
    accepted 1, known   t0 t1 t2 t3 d1 c      caches hold 0 1 2; 3 and 4 not read yet
    accepted 3, known   t0 .. t3 d1 d2 d3 b   caches hold 0 1 2; 3 to 6 not read yet

Thus the caches hold only committed positions of each request, whatever the others
accept; drafted positions are always removed. `engine/drafters/mtp.py` drafts for one
request. `models/mtp/rounds.py` feeds requests whose caches hold different numbers of
positions.

If the head raises, it is disabled for all requests. If a row of its logits holds a NaN,
it is disabled for the request of this row.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_speculation.caches import array_bytes
from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.drafters.mtp import LONGEST_LAG, MtpDrafter
from mlx_speculation.engine.shared_drafters.shared import (
    Drafted,
    SharedChain,
    SharedDrafter,
)
from mlx_speculation.models.mtp import (
    BatchHeadCache,
    HeadCache,
    HeadRound,
    beneath,
)


class SharedHead(SharedDrafter):
    """Drafts for many requests with one head, from the hidden states of their lanes."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: BatchHeadCache | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, and of the hidden states that are not read yet."""
        if self._cache is None:
            return 0
        arrays = (_head(request).committed.arrays for request in self._requests)
        return array_bytes(self._cache.held) + sum(map(array_bytes, arrays))

    def follow(self, requests: Sequence[Drafted]) -> None:
        """Let new requests join, and read the states that plain steps have left."""
        self.done()
        with self._disabling("begin", requests):
            self.leave([])  # requests whose drafter is disabled leave
            self._take_in(requests)
            self._drop()
            lag = 0 if self._cache is None else self._cache.lag
            if max(self._counts(), default=0) > LONGEST_LAG or lag > LONGEST_LAG:
                self._catch_up()
                self._drop(evaluate=True)

    def take_back(self, request: Drafted) -> None:
        """Drop the copy of caches that `_extract` gave to the drafter of a request."""
        if request in self._requests:
            _head(request).handed_over()

    def _extract(self, index: int) -> None:
        """Give the drafter of a request a copy of the request's caches."""
        assert self._cache is not None
        _head(self._requests[index]).take_back(*self._cache.extract(index))

    def leave(self, gone: Sequence[Drafted]) -> None:
        """Let these requests leave, and all others whose drafter is disabled."""
        stay = self._staying(gone)
        if len(stay) == len(self._requests):
            return
        if stay and self._cache is not None:
            self._cache.leave(stay)
        else:
            self._cache = None
        self._requests = [self._requests[index] for index in stay]

    def _most(self, limits: list[int]) -> list[int]:
        """Return the limits; 0 for requests that lack the state a draft begins with.

        It is the target's state of the token before the newest one, which the target
        has not computed if a restored cache held that token.
        """
        pairs = zip(limits, self._counts(), strict=True)
        return [limit if count > 0 else 0 for limit, count in pairs]

    def _drafted(self, most: list[int]) -> list[Proposal]:
        """Draft chains of equal length for all requests; cut each to its limit."""
        assert self._cache is not None
        cache, head = self._cache, _head(self._requests[0])
        length = max(most) if head.depth is None else min(max(most), head.depth)
        pairs = zip(cache.ends[0], self._counts(), strict=True)
        stops = [end + count for end, count in pairs]
        self._round = HeadRound(cache, head.on_target(self._requests))
        if not cache.chained:  # else `draft` feeds these positions
            self._feed(self._round.feed, [stop - 1 for stop in stops])
        chain = self._chain = SharedChain(self._requests, head.ids)
        hidden, texts = self._states(stops), self._texts()
        assert hidden is not None
        self._round.draft(hidden, texts, stops, length, chain.choose)
        return chain.drafts([min(limit, length) for limit in most], head.source)

    def _keep(self, accepted: list[int]) -> None:
        """Keep the positions of committed text, and none of drafted tokens."""
        self._round.commit()

    def _counts(self) -> list[int]:
        """Return the number of states of each request that the head has not read.

        After a round that has accepted n drafted tokens, n + 1 states are unread.
        """
        if self._cache is None:
            return []
        result = []
        for request, end in zip(self._requests, self._cache.ends[0], strict=True):
            committed = _head(request).committed
            known = committed.start <= end
            result.append(max(0, committed.stop - end) if known else 0)
        return result

    def _states(self, stops: Sequence[int]) -> mx.array | None:
        """Return the states of each request from its next position up to its stop.

        Returns:
            [requests, largest count, dim], shorter ones padded on the right; None: no
            request has any.
        """
        assert self._cache is not None
        parts = []
        pairs = zip(self._requests, self._cache.ends[0], stops, strict=True)
        for request, end, stop in pairs:
            committed = _head(request).committed
            parts.append(committed.between(end, stop) if end < stop else None)
        return beneath(parts)

    def _texts(self) -> list[list[int]]:
        return [request.sequence.tokens for request in self._requests]

    def _take_in(self, requests: Sequence[Drafted]) -> None:
        """Let new requests join, if they may get drafts."""
        new, handed = [], []
        for request in requests:
            if request in self._requests or not request.drafts:
                continue
            if (cache := _handed(request)) is not None:
                new.append(request)
                handed.append(cache)
        if not new:
            return
        together = self._cache or BatchHeadCache()
        together.join(handed)
        self._cache, self._requests = together, self._requests + new
        for request in new:
            _head(request).handed_over()

    def _catch_up(self) -> None:
        """Feed the states that plain steps have left, except the newest one."""
        assert self._cache is not None
        pairs = zip(self._texts(), self._cache.ends[0], self._counts(), strict=True)
        # A step in flight leaves one more state, whose next token is not known yet.
        stops = [min(len(text) - 2, end + count) for text, end, count in pairs]
        on_target = _head(self._requests[0]).on_target(self._requests)
        self._feed(HeadRound(self._cache, on_target).read, stops)

    def _feed(self, feed: Callable[..., None], stops: list[int]) -> None:
        """Feed the next positions of every request up to its stop, if there are any."""
        assert self._cache is not None
        stops = [*map(max, self._cache.ends[0], stops)]
        if stops != self._cache.ends[0] or self._cache.lag:
            feed(self._states(stops), self._texts(), stops)

    def _drop(self, *, evaluate: bool = False) -> None:
        """Drop the states that were read, but keep the last ones for restore points."""
        ends = [] if self._cache is None else self._cache.ends[0]
        for request, end in zip(self._requests, ends, strict=True):
            head = _head(request)
            head.committed.drop(end - head.again + 1)
            if evaluate:
                mx.eval(head.committed.arrays)


def _head(request: Drafted) -> MtpDrafter:
    head: MtpDrafter = request.open_drafter.shared.batch_head
    return head


def _handed(request: Drafted) -> HeadCache | None:
    """Return the caches of a request's own drafter; None: the drafter is disabled."""
    drafter = request.open_drafter.shared
    if not drafter.disabled:
        drafter.begin(request.sequence)
    if drafter.disabled:
        return None
    try:
        return _head(request).hand_over()
    except Exception as error:
        drafter.fail("begin", error)  # raises a MemoryError again
        return None
