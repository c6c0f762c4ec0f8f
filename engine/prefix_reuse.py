"""One stream's use of a prefix cache: look up, take restore points, fill.

A head that reads the target's states has rows of its own. Row m of its layer k pairs
the state at m with token m + 1 + k, so with L layers rows [0, n) follow from the tokens
[0, n + L), and are kept under windows of L + 1 tokens:

    rows alone      the target resumes L tokens before the known ones end, and feeds
                    these again: their states are what the head reads next
    restore points  the target resumes there, and the last L states are kept with it

A head with windows keeps no rows: it begins as many tokens earlier as they see.

So drafts after a beginning that is known are those after one that was read.
"""

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mlx_speculation.caches import PrefixCache, Snapshot, split
from mlx_speculation.models import Lane, RestorePoints


class PrefixReuse:
    """The prefix cache, as one stream sees it."""

    def __init__(
        self,
        cache: PrefixCache,  # the prefix cache of the generator
        # Returns the target's lane and the draft model's, if there is one, in the order
        # in which `cache` was bound to the models; None for a lane that is to be passed
        # over
        lanes: Callable[[], Sequence[Lane | None]],
        reach: int,  # how many tokens a round adds to a lane at most
        keys: Sequence[int] = (),  # what stands for the tokens of a prompt with images
        # Returns the head in the drafter, see `OpenDrafter.prefix_head`
        head: Callable[[], Any] = lambda: None,
        kept_head: int | None = None,  # the index of its rows in `cache`, if it has any
    ) -> None:
        self._cache, self._lanes, self._reach = cache, lanes, reach
        self._keys, self._head, self._kept_head = keys, head, kept_head

    def begin(self, tokens: Sequence[int]) -> int:
        """Let the lanes hold what is known of `tokens`, but not the last token.

        Returns:
            How many tokens the target's lane holds.
        """
        self._thread = threading.get_ident()
        named, head = self._named(tokens)[:-1], self._head()
        used, again = self._cache.stamp(), 0 if head is None else head.again
        for which, lane in self._each():
            rows = self._cache.lookup(which, named, used)
            stateful = self._cache.stateful(which)
            if which == 0 and rows is not None and not stateful:
                rows = _shorter(rows, again)
            if rows is not None:
                lane.resume(rows)
            if stateful:
                lane.points = RestorePoints(self._cache)
                lane.points.resumed(lane.seen)
                if which == 0 and head is not None:
                    lane.points.hidden = lambda: head.committed.last(again)
        target = self._target
        if head is not None and target.seen:
            self._resume_head(head, named, target.seen, used)
        return target.seen

    def _resume_head(
        self, head: Any, named: Sequence[int], seen: int, used: int
    ) -> None:
        """Let a head hold the rows before the states that it reads next."""
        first, again = seen, head.again
        if self._cache.stateful(0):
            hidden = self._cache.hidden(named[:seen])
            if hidden is not None:
                first = seen - hidden.shape[1]
                head.committed.seed(hidden, seen)
        if self._kept_head is None or first <= 0:
            return
        windows = _windows(named[: first + again], again)
        rows = self._cache.lookup(self._kept_head, windows, used)
        if rows is not None and rows.stop == first:
            head.resume(rows)

    def between_rounds(
        self, caches: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Take the restore points that are due.

        Args:
            caches: lets the target's lane hold its caches meanwhile, where those of a
                batch have them.
        """
        for which, lane in self._each():
            points = lane.points
            if points is not None and points.due(lane.seen, self._reach):
                with nullcontext() if which else caches():
                    points.take(lane)

    def store(self, tokens: Sequence[int], *, ended: bool = True) -> None:
        """Keep what the lanes hold of the known `tokens`.

        Args:
            tokens: the known ones.
            ended: whether no round follows.
        """
        used, head = self._cache.stamp(), self._head()
        for which, lane in self._each():
            points = None if lane.points is None else lane.points.running
            named = self._named(tokens)[: lane.seen]
            hidden = None
            if which == 0 and head is not None and lane.points is not None:
                hidden = lane.points.hidden()
            self._cache.store(
                which, named, lane.caches, points, hidden=hidden, used=used
            )
        if head is not None and ended:
            head.level()
        index = self._kept_head
        if index is not None and head is not None and (kept := head.kept()):
            caches, rows = kept
            windows = _windows(self._named(tokens)[: rows + head.again], head.again)
            if len(windows) == rows:
                self._cache.store(index, windows, caches, used=used)

    @property
    def _target(self) -> Lane:
        target = self._lanes()[0]
        assert target is not None
        return target

    def store_dropped(self, tokens: Sequence[int]) -> None:
        """Keep it when the stream is dropped before its end, if that is safe here.

        The collector may drop it in another thread, which cannot evaluate what this
        one's streams have not computed yet, or while the interpreter shuts down.
        """
        if self._thread == threading.get_ident() and not sys.is_finalizing():
            self.store(tokens, ended=False)

    def forget(self) -> None:
        """Keep nothing, after an error."""
        for _, lane in self._each():
            lane.points = None

    def _named(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return what the cache knows the tokens by."""
        keys = self._keys
        return [*keys, *tokens[len(keys) :]] if keys else tokens

    def _each(self) -> list[tuple[int, Lane]]:
        """Return the lanes, each with its place in the order."""
        lanes = enumerate(self._lanes())
        return [(which, lane) for which, lane in lanes if lane is not None]


def _shorter(held: Snapshot, count: int) -> Snapshot | None:
    """Return a snapshot without the last `count` tokens; None: that is nothing."""
    if not count:
        return held
    return split(held, held.stop - count)[0] if held.stop > count else None


def _windows(tokens: Sequence[int], again: int) -> list[Hashable]:
    """Return what each row of a head depends on beside the rows before it."""
    count = len(tokens) - again
    return [tuple(tokens[i : i + again + 1]) for i in range(count)]
