"""The hidden states of a lane's committed tokens, for drafters that read them.

    committed = CommittedStates(taps, lambda states: states.after_norm)
    lane.follower = committed
    ...                                   # prompts are fed, rounds are committed
    committed.between(3, 7)               # states of the known tokens 3 to 6

Every commit of the lane adds the states of the kept positions, and a rollback of that
commit removes them. A drafter drops the states that it has read.
"""

import weakref
from collections.abc import Callable

import mlx.core as mx

from mlx_speculation.models.introspect.hidden_states import HiddenStates
from mlx_speculation.models.introspect.taps import States

Callback = Callable[[], None]

# Twice the longest chunk of a prompt; a drafter never leaves more states unread.
MOST_UNREAD = 4096


class CommittedStates:
    """States of positions [start, stop), counted in the lane's known tokens.

    `select` makes states [1, positions, dim] from those that `taps` collects.
    """

    def __init__(
        self, taps: HiddenStates, select: Callable[[States], mx.array]
    ) -> None:
        self.taps = taps
        self.select = select
        self._after_chunk: weakref.WeakMethod[Callback] | None = None
        self._through: weakref.WeakMethod[Callable[[Callback], None]] | None = None
        self.start = self.stop = 0
        self._parts: list[mx.array] = []

    def add(self, first: int, states: mx.array, keep: int) -> None:
        """Add the first `keep` selected states of a round that began at `first`.

        All earlier states are dropped if `first` is not `stop`, or if more than
        `MOST_UNREAD` are held.
        """
        if first != self.stop or self.stop - self.start > MOST_UNREAD:
            self._parts, self.start = [], first
        self.stop = first + keep
        if keep:
            self._parts.append(states[:, :keep])

    def last(self, count: int) -> mx.array | None:
        """Return a copy of the states of the last `min(count, stop)` tokens.

        None: this number is 0, or some of these states were dropped.
        """
        start = max(0, self.stop - count)
        if start == self.stop or start < self.start:
            return None
        part = self.between(start, self.stop)
        copied = mx.concatenate([part, part[:, :0]], axis=1)
        mx.eval(copied)
        return copied

    def seed(self, states: mx.array, stop: int) -> None:
        """Replace all states by these, of the positions before `stop`."""
        self.start, self.stop = stop - states.shape[1], stop
        self._parts = [states]

    def take_back(self, stop: int) -> None:
        """Remove the states of positions from `stop` on."""
        if stop <= self.start:
            self._parts, self.start = [], stop
        else:
            left = self.between(self.start, min(stop, self.stop))
            self._parts = [left]
        self.stop = min(stop, self.stop)

    def between(self, start: int, stop: int) -> mx.array:
        """Return the states of positions [start, stop), [1, stop - start, dim]."""
        assert self.start <= start < stop <= self.stop
        if len(self._parts) > 1:
            self._parts = [mx.concatenate(self._parts, axis=1)]
        return self._parts[0][:, start - self.start : stop - self.start]

    def drop(self, start: int) -> None:
        """Forget the states of positions before `start`."""
        if start >= self.stop:
            self._parts, self.start = [], self.stop
        elif start > self.start:
            self._parts, self.start = [self.between(start, self.stop)], start

    def after_chunk(self, method: Callback) -> None:
        """Set a bound method, held weakly, that is called after each chunk of a prompt.

        The method should drop states, since the states of a long prompt are large.
        """
        self._after_chunk = weakref.WeakMethod(method)  # no cycle around the caches

    def call_through(self, caller: Callable[[Callback], None]) -> None:
        """Set a bound method, held weakly, that calls the method of `after_chunk`."""
        self._through = weakref.WeakMethod(caller)

    def chunk_done(self) -> None:
        """Call `after_chunk`'s method, by way of `call_through`'s if there is one."""
        method = None if self._after_chunk is None else self._after_chunk()
        through = None if self._through is None else self._through()
        if method is not None and through is not None:
            through(method)
        elif method is not None:
            method()

    @property
    def arrays(self) -> list[mx.array]:
        """Kept arrays, to be evaluated."""
        return self._parts
