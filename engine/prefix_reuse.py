"""One stream's use of a prefix cache: look up, take restore points, store.

A head that reads the target's hidden states has cache rows of its own. Row m of its
layer k pairs the state of position m with token m + 1 + k. So with L layers, rows
[0, n) depend on tokens [0, n + L), and the head next needs the states of positions
[n, n + L). They come from the target, whose caches can be resumed

    at any position         it resumes at n, and feeds the L tokens again
    at restore points only  it resumes at a point at n + L, which keeps the states too

For a head with sliding windows no rows are kept: the target resumes early enough to
feed again all tokens that the windows see. In each case, the drafts are the same as
after a prefill of the whole prompt.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from mlx_speculation.caches import Left, PrefixCache
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.models import Lane, RestorePoints


@dataclass(eq=False)
class PrefixReuse:
    """The prefix cache for one stream."""

    cache: PrefixCache
    # Returns the lanes of the target and of draft models, in the order in which `cache`
    # was bound to the models; None: a lane to skip
    lanes: Callable[[], Sequence[Lane | None]]
    reach: int  # the largest number of tokens that a round adds to a lane
    keys: Sequence[int]  # replace the prompt's ids in `cache`; empty: no images
    head: Callable[[], Any]  # returns `OpenDrafter.prefix_head`
    kept_head: int | None  # the head's index in `cache`; None: no rows are kept
    ends: Collection[int]  # the ids of tokens that end a turn

    def begin(self, tokens: Sequence[int], statistics: Statistics) -> None:
        """Resume the lanes from the cached prefix of `tokens[:-1]`."""
        started = time.perf_counter()
        self._thread, self._prompt = threading.get_ident(), len(tokens)
        cache, named, head = self.cache, self._named(tokens)[:-1], self.head()
        again = 0 if head is None else head.again
        in_memory = cache.fetch(named)
        for which, lane in self._each():
            # `named` lacks the last token. A draft model resumes one token less: if a
            # batch shares it, it lags two tokens behind each text.
            known = named[:-1] if which else named
            rows = cache.lookup(which, known, 0 if which else again)
            if rows is not None:
                lane.resume(rows)
            if cache.stateful(which):
                lane.points = RestorePoints(cache, self._places(tokens, known))
                lane.points.resumed(lane.seen)
                if which == 0 and head is not None:
                    lane.points.hidden = lambda: head.committed.last(again)
        statistics.reused = seen = first = self._target.seen
        statistics.reused_from_disk = max(0, seen - in_memory)
        if head is not None and (hidden := cache.hidden(named[:seen])) is not None:
            first -= hidden.shape[1]
            head.committed.seed(hidden, seen)
        if head is not None and self.kept_head is not None:
            rows = cache.lookup(self.kept_head, named[: first + again])
            if rows is not None and rows.stop == first:
                head.resume(rows)
        statistics.prefill_seconds += time.perf_counter() - started

    def between_rounds(
        self, caches: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Take the restore points that are due, inside of the context `caches()`.

        Requests in a batch need the context: their caches are in a shared lane.
        """
        due = [
            (lane.points, lane)
            for lane in self.lanes()
            if lane is not None and lane.points is not None
            if lane.points.due(lane.seen, self.reach)
        ]
        if due:
            with caches():
                for points, lane in due:
                    points.take(lane.caches, lane.seen)

    def store(self, tokens: Sequence[int], *, ended: bool = True) -> None:
        """Store the rows of `tokens` that the lanes hold; `ended`: no round follows."""
        head, left = self.head(), []
        for which, lane in self._each():
            points = lane.points
            taken, hidden = (
                (points.running.taken, points.hidden()) if points else ([], None)
            )
            left.append(Left(which, lane.caches, lane.seen, taken, hidden))
        if head is not None and self.kept_head is not None:
            if ended:
                head.level()
            if kept := head.kept():
                caches, rows = kept
                left.append(Left(self.kept_head, caches, rows + head.again, []))
        named = self._named(tokens)[: self._target.seen]
        self.cache.store(named, left, self._prompt)

    def _places(self, tokens: Sequence[int], known: Sequence[int]) -> set[int]:
        """Return the positions at which later prompts are likely to diverge."""
        # After the last complete turn, templates may change how the next turn begins.
        places = range(len(known), 0, -1)
        end = next((at for at in places if tokens[at - 1] in self.ends), 0)
        return {self.cache.border(known), end}

    @property
    def _target(self) -> Lane:
        target = self.lanes()[0]
        assert target is not None
        return target

    def store_dropped(self, tokens: Sequence[int]) -> None:
        """Store `tokens` of a stream that is dropped before its end, if safe."""
        # The garbage collector may run while the interpreter shuts down, or in another
        # thread, which cannot evaluate arrays of this thread.
        if self._thread == threading.get_ident() and not sys.is_finalizing():
            self.store(tokens, ended=False)

    def forget(self) -> None:
        """Drop the restore points."""
        for _, lane in self._each():
            lane.points = None

    def _named(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the keys by which the prefix cache knows the tokens."""
        keys = self.keys
        return [*keys, *tokens[len(keys) :]] if keys else tokens

    def _each(self) -> list[tuple[int, Lane]]:
        """Return the lanes to use, each with its index."""
        return [
            (which, lane)
            for which, lane in enumerate(self.lanes())
            # In a batch, requests share the caches of a draft model. Their own lanes
            # then have none.
            if lane is not None and (lane.caches or not which)
        ]
