"""How a stream is begun by one rank; where the target is whole, by the only one."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from mlx_speculation.engine.distributed.leader_follower import RankParts
from mlx_speculation.engine.distributed.target import RankedTarget
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Sampling


class StreamSetup:
    """The ranks of one new stream, as this one has them.

    Every rank makes one for each of its streams, in the same order.

    Args:
        target: the target on its ranks; None: it is whole.
        draft: what drafts on this rank.

    Attributes:
        session: the stream on all ranks; None: there is one.
    """

    def __init__(self, target: RankedTarget | None, draft: Any) -> None:
        self._target = target
        self.session = None if target is None else target.next_stream(draft)

    def with_seed(self, sampling: Sampling | None) -> Sampling:
        """Return the options with a seed, the same on all ranks."""
        if self.session is not None:
            sampling = self.session.with_seed(sampling)
        return (sampling or Sampling()).with_seed()

    def parts(
        self, own: RankParts, fields: Callable[[], Mapping[str, Any]]
    ) -> RankParts:
        """Return what is asked on this rank.

        Args:
            own: what this rank has.
            fields: returns the options that have to be the same on all ranks.
        """
        if self.session is None:
            return own
        self.session.expect(fields())
        return own.on_ranks(self.session)

    def running(
        self, lane: Lane, around: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """Return what a stream enters at its first chunk.

        Args:
            lane: the target's.
            around: what it enters on one rank.
        """
        if self._target is None or self.session is None:
            return around
        return self._target.running(self.session, lane, around)
