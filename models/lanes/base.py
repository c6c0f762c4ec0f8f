"""The protocols of lanes: a model with the caches of its requests, and their rounds.

    with lane.begin(1 + width) as lane_round:
        logits = lane_round.forward(tokens)    [requests, n] -> [requests, n, vocab]
        lane_round.prepare(keep)               does everything that can fail
        lane_round.commit(keep)
    lane = lane.join(others)                   between rounds
    lane.leave(stay)
    lane.extract(place)

`join` of a lane of one request returns a new lane, a batch. A batch with one request
left is still a batch. Requests have places, 0 to n - 1, in the order in which they
joined.
"""

from collections.abc import Sequence
from typing import Any, Protocol, Self

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.caches import Keep, Speculation, array_bytes
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.introspect.taps import States


class RequestRound(Protocol):
    """Forwards over all requests of a lane; each request then keeps a prefix.

    Use it as a context manager: leaving it without a commit rolls back.
    """

    speculation: Speculation
    _hidden: States | None

    @property
    def hidden(self) -> States:
        """The hidden states of all forwards, arrays [requests, positions, dim].

        Raises:
            InvalidRequestError: the lane had no taps when the round began.
        """
        if self._hidden is None:
            raise InvalidRequestError(
                "This round collects no hidden states. Before it begins, set "
                "lane.taps = HiddenStates(lane.model, after_norm=True)"
            )
        return self._hidden

    def forward(self, tokens: mx.array) -> mx.array:
        """Feed tokens [requests, n]; return logits [requests, n, vocab], not evaluated.

        The caller pads shorter rows on the right with any ids, and keeps none of the
        padding.
        """
        ...

    def prepare(self, keep: Keep) -> None:
        """Do every step of `commit(keep)` that can fail, without changing a cache."""
        ...

    def commit(self, keep: Keep) -> None:
        """Keep the first tokens of each request. Does not fail after `prepare`."""
        ...

    def rollback(self) -> None:
        """Undo every forward, even after a commit if nothing has been written since."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...


class RequestLane(Protocol):
    """A model, and caches of one or more requests.

    The methods that have a body here are for a lane of one request.
    """

    model: nn.Module
    caches: list[Any]  # for each layer; empty while a batch holds the lane's request
    requests: int  # the number of requests
    holder: "RequestLane | None" = None  # the batch that holds the lane's request
    part: int = 0  # the number of layers that a round submits at once; 0: all of them

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, as allocated."""
        return array_bytes(self.caches)

    @property
    def size(self) -> int | None:
        """Number of rows of a padded forward of several positions; None: no padding."""
        return None

    def met_new_shapes(self) -> bool:
        """Return whether, since the last call, a shape was fed that is new."""
        return False

    def begin(self, count: int, *, whole: bool = False) -> RequestRound:
        """Open a round that feeds `count` tokens for each request.

        If new shapes cost much, a forward over `count` tokens is padded to one of a few
        shapes. With `whole`, the caller promises to keep all tokens or none.
        """
        ...

    def join(self, lanes: "Sequence[RequestLane]") -> "RequestLane":
        """Add the requests of other lanes; return the lane that holds all.

        The caches of `lanes` are copied. Those lanes have no caches afterwards, and
        neither does this lane if the result is a new batch. An error leaves all lanes
        unchanged.
        """
        ...

    def leave(self, stay: Sequence[int]) -> None:
        """Keep the requests at these places, in this order, and drop the others."""
        if not stay:
            self.caches = []

    def places_of(self, lanes: "Sequence[RequestLane]") -> list[int]:
        """Return the indices of the requests of `lanes` on the caches' batch axis."""
        return [0]

    def extract(self, place: int) -> list[Any]:
        """Return a request's caches, valid until the next round; of a batch, copies."""
        return self.caches
