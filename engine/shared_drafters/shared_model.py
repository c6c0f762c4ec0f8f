"""A draft model that drafts for many requests at once, in one forward per token.

The caches lack only the last known tokens of a request; their number is called the lag.
A draft needs the same lag for all requests, so that its forwards need no padded tokens.
After a round with a draft the lag is 2: if all k tokens were accepted, the caches lack
the last of them, which was not fed, and the bonus. If fewer were accepted, the caches
drop the token before the correction too, and lack both. So a draft's first forward
feeds two tokens of each request.

    known before   t0 t1 t2 t3              held t0 t1, lag 2, k = 3
    fed            t2 t3 | d1 | d2          d3 is chosen last and not fed
    accepted 3     known t0..t3 d1 d2 d3 b  held t0..t3 d1 d2
    accepted 1     known t0..t3 d1 c        held t0..t3

If the model raises, it is disabled for all requests. If a row of its logits holds a
NaN, it is disabled for the request of this row. A request that has reached the end of
the model's table of positions leaves.
"""

from collections.abc import Sequence

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.drafters.draft_model import LONGEST_LAG, ModelRound
from mlx_speculation.engine.shared_drafters.shared import (
    Drafted,
    SharedChain,
    SharedDrafter,
)
from mlx_speculation.models import BatchLane, Lane, PrefillBudget

LAG = 2


class SharedModel(SharedDrafter):
    """Drafts for many requests with one model, in a lane that they share.

    The `seen` of a request's own lane counts the request's tokens in the shared lane.
    """

    def __init__(self, lane: BatchLane) -> None:
        super().__init__()
        self.lane = lane
        self._lanes: dict[Drafted, Lane] = {}  # each request's own lane

    @property
    def nbytes(self) -> int:
        """Bytes of the lane's caches."""
        return self.lane.nbytes

    def met_new_shapes(self) -> bool:
        """Return whether the lane has run with a new shape since the last call."""
        return self.lane.met_new_shapes()

    def follow(self, requests: Sequence[Drafted]) -> None:
        """Prepare for the requests of the next round, in their order."""
        self.done()
        for request in requests:
            lane = None
            if request not in self._lanes:
                lane = request.open_drafter.shared.batch_lane
            if lane is not None:
                self._lanes[request] = lane

    def within(self, requests: Sequence[Drafted], limits: list[int]) -> list[int]:
        """Return the limits, cut to the positions that the model has left."""
        result = []
        for request, limit in zip(requests, limits, strict=True):
            lane, room = self._lanes.get(request), 0
            if lane is not None:
                room = lane.positions - len(request.sequence.tokens) + 1
            result.append(max(0, min(limit, room)))
        return result

    def prepare(self, requests: Sequence[Drafted], limits: Sequence[int]) -> None:
        """Let requests that may draft join the lane, without their last two tokens.

        A call reads at most `prefill_step` tokens of all that join. A request joins
        after its tokens are read.
        """
        with self._disabling("begin", requests):
            self._take_in(requests, limits)

    def take_back(self, request: Drafted) -> None:
        """Drop the copy of caches that `_extract` gave to the drafter of a request."""
        if request in self._requests:
            self._lanes[request].caches = []

    def _extract(self, index: int) -> None:
        """Give the drafter of a request a copy of the request's caches."""
        self._lanes[self._requests[index]].caches = self.lane.extract(index)

    def leave(self, gone: Sequence[Drafted]) -> None:
        """Let these requests leave, and all others whose drafter is disabled."""
        for request in gone:
            self._lanes.pop(request, None)
        stay = self._staying(gone)
        if len(stay) < len(self._requests):
            self.lane.leave(stay)
            self._requests = [self._requests[index] for index in stay]

    def _most(self, limits: list[int]) -> list[int]:
        """Return the limits, or [] if the lane has too many tokens to read first."""
        if not self._requests or self._lag() > LONGEST_LAG:
            return []
        # Lags differ after rounds of other drafters. A lane with a `size` catches up
        # even if they are equal, since each new lag would be a new shape.
        if any(limits) and (self.lane.size is not None or len(set(self._lags())) > 1):
            self._catch_up()
        return limits if len(set(self._lags())) == 1 else []

    def _drafted(self, most: list[int]) -> list[Proposal]:
        """Draft chains of equal length for all requests; cut each to its limit."""
        lag = self._lag()
        tokens = [request.sequence.tokens[-lag:] for request in self._requests]
        inputs = mx.array(tokens, mx.uint32)
        self._round = ModelRound(self.lane, lag + max(most) - 1)
        chain = self._chain = SharedChain(self._requests)
        self._round.draft(inputs, max(most), chain.choose)
        return chain.drafts(most, "model")

    def _keep(self, accepted: list[int]) -> None:
        """Keep the rows of each request's known tokens, except the last two tokens."""
        self._round.commit(accepted, even=True)

    def _lags(self) -> list[int]:
        """Return how many known tokens of each request the lane does not hold."""
        return [
            len(request.sequence.tokens) - self._lanes[request].seen
            for request in self._requests
        ]

    def _lag(self) -> int:
        """Return the longest lag."""
        return max(self._lags())

    def _take_in(self, requests: Sequence[Drafted], limits: Sequence[int]) -> None:
        """Do the work of `prepare`, which treats any error as a fault."""
        rooms = self.within(self._requests, [1] * len(self._requests))
        places = zip(self._requests, rooms, strict=True)
        self.leave([request for request, room in places if not room])
        inside = set(self._requests)
        new = [
            request
            for request, limit in zip(requests, limits, strict=True)
            if limit > 0
            and request not in inside
            and not request.open_drafter.shared.disabled
        ]
        # Recurrent layers that were fed nothing have no state to join.
        new = self._read([one for one in new if len(one.sequence.tokens) > LAG])
        if self._requests and (new or self._lag() > LONGEST_LAG):
            self._catch_up()
        if new and (not self._requests or self._lag() == LAG):
            self.lane.join([self._lanes[request] for request in new])
            self._requests = self._requests + new

    def _read(self, requests: Sequence[Drafted]) -> list[Drafted]:
        """Read at most `prefill_step` tokens; return the requests that are read."""
        result: list[Drafted] = []
        room: PrefillBudget | None = None
        for request in requests:
            lane, tokens = self._lanes[request], request.sequence.tokens
            if lane.seen > len(tokens) - LAG:
                # The prefix cache gave the lane one token too many. After the next
                # round, the lane lacks two tokens again.
                continue
            room = room or PrefillBudget(lane.prefill_step)
            if not lane.feed(tokens[lane.seen : -LAG], fits=room.fits):
                break
            result.append(request)
        return result

    def _catch_up(self) -> None:
        """Feed tokens that rounds without drafts have added, except the last two.

        A call feeds at most `prefill_step` tokens for all requests together.
        """
        step = min(request.target.prefill_step for request in self._requests)
        most = max(1, step // len(self._requests))
        left = [max(0, min(most, lag - LAG)) for lag in self._lags()]
        for count in self._counts(max(left)):
            fed, each = [], [min(count, size) for size in left]
            for request, n in zip(self._requests, each, strict=True):
                seen = self._lanes[request].seen
                missed = request.sequence.tokens[seen : seen + n]
                fed.append(missed + [0] * (count - n))
            even = min(each) == count
            with self.lane.begin(count, whole=even) as lane_round:
                mx.eval(lane_round.forward(mx.array(fed)))
                lane_round.commit(count if even else each)
            left = [size - n for size, n in zip(left, each, strict=True)]

    def _counts(self, missed: int) -> list[int]:
        """Return the sizes of the forwards that feed `missed` tokens.

        In a lane with a `size` they are powers of two, as each new shape costs time.
        """
        if self.lane.size is None:
            return [missed] if missed else []
        bits = range(missed.bit_length())
        return [1 << bit for bit in reversed(bits) if missed >> bit & 1]
