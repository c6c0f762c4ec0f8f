"""A stream of which every rank runs its part.

All ranks yield the same chunks. Where it ends is rank 0's to say: `close()` of another
rank follows rank 0 to its end, and a rank that leaves by an error ends it for all. A
stream that is dropped ends on each rank by itself, and says nothing to the others.
"""

import sys
from types import TracebackType
from typing import Any

from mlx_speculation.engine.distributed.session import (
    ClosedByLeaderError,
    RankSession,
)
from mlx_speculation.engine.result import Chunk
from mlx_speculation.engine.round.ending import take_back
from mlx_speculation.engine.stream import Stream


class RankedStream(Stream):
    """A `Stream` that does what rank 0 does.

    Args:
        session: the stream on all ranks.
        options: what `Stream` takes.
    """

    def __init__(self, session: RankSession, **options: Any) -> None:
        super().__init__(**options)
        self._session = session
        self.before_round = self._turn

    def __next__(self) -> Chunk:
        with self._session.inside():
            try:
                chunk = super().__next__()
            except ClosedByLeaderError:
                raise StopIteration from None
            self._session.settled()
            return chunk

    def _turn(self) -> None:
        """Begin a round on all ranks with an exchange, if not with that of its plan."""
        if self._decoder.planned:
            self._session.turn()

    def close(self) -> None:
        """End the generation now; on other ranks than 0, where rank 0 ends it."""
        if self._result is not None:
            return
        if not self._session.leads and self._session.running:
            self.ready.clear()
            for _ in self:
                pass
            return
        with self._session.inside():
            self._session.close(len(self.ready) if self._yielded_only else 0)
            super().close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not self._session.leads and self._result is None:
            self.end("error", hold_all=False)  # rank 0 will not hear of it otherwise
        else:
            self.close()

    def end(self, reason: str, *, hold_all: bool = True) -> None:
        """End on this rank, as rank 0 has, and tell the others of an error."""
        closed = self._session.closed
        error = sys.exception() if reason == "error" else None
        if reason == "error" and closed is not None:
            reason = "closed"
            hold_all = self.stats.rounds > 0
            if closed.taken_back:
                take_back(self._decoder.rounds, closed.taken_back)
        try:
            super().end(reason, hold_all=hold_all)
        except BaseException as second:
            error = error or second
            raise
        finally:
            self._session.end(error)
