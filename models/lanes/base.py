"""The contract of lanes: a model with the caches of its requests, and their rounds.

    with lane.begin(1 + width) as lane_round:
        logits = lane_round.forward(tokens)    [requests, n] -> [requests, n, vocab]
        lane_round.prepare(keep)               of each request; all that can fail
        lane_round.commit(keep)
    lane = lane.join(others)                   between rounds
    lane.leave(stay)
    lane.extract(place)

`single` holds one request in the model's own caches; `batch` holds many in batch
caches. A lane of one becomes a batch when others join, and stays one until it is empty.
Requests have places, 0 to n - 1, in the order in which they joined. Which request
stands where, its text and its sampler are not known here.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_speculation.caches import Keep, array_bytes
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.introspect.taps import States


class RequestRound(Protocol):
    """Forwards over all requests of a lane, of which each keeps a prefix.

    Use it as a context manager: leaving without a commit rolls back.
    """

    @property
    def hidden(self) -> States:
        """The hidden states of all forwards, [requests, positions, dim] each.

        Raises:
            InvalidRequestError: the lane had no taps when the round began.
        """
        ...

    def forward(self, tokens: mx.array) -> mx.array:
        """Feed tokens [requests, n]; return logits [requests, n, vocab].

        Nothing is evaluated. Requests with fewer tokens are padded on the right with
        any, and keep none of these.
        """
        ...

    def prepare(self, keep: Keep) -> None:
        """Do everything of `commit(keep)` that can fail, and change no cache.

        Args:
            keep: how many of the fed tokens each request keeps, or all of them.
        """
        ...

    def commit(self, keep: Keep) -> None:
        """Keep the first tokens of each request; after `prepare` it does not fail."""
        ...

    def rollback(self) -> None:
        """Undo every forward, also after a commit while nothing else has written."""
        ...

    def __enter__(self) -> "RequestRound": ...

    def __exit__(self, *error: Any) -> None: ...


class RequestLane(Protocol):
    """A model and what its caches hold of requests.

    What is defined here is of a lane that holds one request.

    Attributes:
        model: an mlx-lm model.
        caches: of all requests, one per layer; none while a batch holds them.
        requests: how many there are.
        holder: the batch that holds its one request; None: it does so itself.
        part: layers of a round's forward that are submitted at once; 0: all of them.
            See `models.submit_layers`.
    """

    model: nn.Module
    caches: list[Any]
    requests: int
    holder: "RequestLane | None" = None
    part: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, as allocated."""
        return array_bytes(self.caches)

    @property
    def size(self) -> int | None:
        """Number of requests shown to the model in wide rounds; None: `requests`."""
        return None

    def met_new_shapes(self) -> bool:
        """Return whether a shape was fed for the first time since the last call."""
        return False

    def begin(self, count: int, *, whole: bool = False) -> RequestRound:
        """Open a round of which a prefix of each request, or with `whole` all, is kept.

        Args:
            count: how many tokens of each request it feeds. Where new shapes cost much,
                a forward over all of them is filled up to a known one.
            whole: promise that all or nothing is kept.
        """
        ...

    def join(self, lanes: "Sequence[RequestLane]") -> "RequestLane":
        """Let the requests of other lanes stand behind its own; return what holds all.

        The others are left without caches, and so is this one where a batch takes its
        place: what they held is copied. If it fails, all are as before.
        """
        ...

    def leave(self, stay: Sequence[int]) -> None:
        """Keep the requests at these places, in this order, and drop the others."""
        if not stay:
            self.caches = []

    def places_of(self, lanes: "Sequence[RequestLane]") -> list[int]:
        """Return where the rows of these requests stand, which it holds."""
        return [0]

    def extract(self, place: int) -> list[Any]:
        """Return caches of one request alone, to be read before the next round.

        Of a batch they are copies; sliding ones are of the kind that the request had.
        """
        return self.caches


def collected(states: States | None) -> States:
    """Return the states of a round, which there are if its lane had taps."""
    if states is None:
        raise InvalidRequestError(
            "This round collects no hidden states. Before it begins: "
            "lane.taps = HiddenStates(lane.model, after_norm=True)"
        )
    return states
