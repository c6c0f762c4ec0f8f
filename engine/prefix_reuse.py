"""One stream's use of a prefix cache: look up, take restore points, fill.

A head that reads the target's states has rows of its own. Row m of its layer k pairs
the state at m with token m + 1 + k, so with L layers rows [0, n) follow from the tokens
[0, n + L). Behind them it goes on with the states of the last L:

    rows alone      the target resumes L tokens before the known ones end, and feeds
                    these again: their states are what the head reads next
    restore points  the target resumes there, and the last L states are kept with it

A head with windows keeps no rows: it begins as many tokens earlier as they see.

So drafts after a beginning that is known are those after one that was read.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mlx_speculation.caches import Left, PrefixCache
from mlx_speculation.engine.stats import Statistics
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
        ends: Collection[int] = (),  # the ids of tokens that end a turn
    ) -> None:
        self._cache, self._lanes, self._reach = cache, lanes, reach
        self._keys, self._head, self._kept_head = keys, head, kept_head
        self._ends = ends

    def begin(self, tokens: Sequence[int], statistics: Statistics) -> None:
        """Let the lanes hold what is known of `tokens`, but not the last token.

        Args:
            tokens: the prompt's.
            statistics: notes what is not read again, and the time that it took.
        """
        started = time.perf_counter()
        self._thread, self._prompt = threading.get_ident(), len(tokens)
        cache, named, head = self._cache, self._named(tokens)[:-1], self._head()
        again = 0 if head is None else head.again
        in_memory = cache.fetch(named)
        for which, lane in self._each():
            # One model drafts for all of a batch two tokens behind each text.
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
        if head is not None and self._kept_head is not None:
            rows = cache.lookup(self._kept_head, named[: first + again])
            if rows is not None and rows.stop == first:
                head.resume(rows)
        statistics.prefill_seconds += time.perf_counter() - started

    def between_rounds(
        self, caches: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Take the restore points that are due.

        Args:
            caches: lets the lanes hold their caches meanwhile, where those of a batch
                have them.
        """
        due = [
            (lane.points, lane)
            for lane in self._lanes()
            if lane is not None and lane.points is not None
            if lane.points.due(lane.seen, self._reach)
        ]
        if due:
            with caches():
                for points, lane in due:
                    points.take(lane)

    def store(self, tokens: Sequence[int], *, ended: bool = True) -> None:
        """Keep what the lanes hold of the known `tokens`.

        Args:
            tokens: the known ones.
            ended: whether no round follows.
        """
        head, left = self._head(), []
        for which, lane in self._each():
            points = lane.points
            taken, hidden = (
                (points.running.taken, points.hidden()) if points else ([], None)
            )
            left.append(Left(which, lane.caches, lane.seen, taken, hidden))
        if head is not None and self._kept_head is not None:
            if ended:
                head.level()
            if kept := head.kept():
                caches, rows = kept
                left.append(Left(self._kept_head, caches, rows + head.again, []))
        named = self._named(tokens)[: self._target.seen]
        self._cache.store(named, left, self._prompt)

    def _places(self, tokens: Sequence[int], known: Sequence[int]) -> set[int]:
        """Return where later prompts are likely to part from this one.

        That is after its last whole turn, since templates change how the next one
        begins; and where it parts from earlier ones, as others will too.
        """
        places = range(len(known), 0, -1)
        end = next((at for at in places if tokens[at - 1] in self._ends), 0)
        return {self._cache.border(known), end}

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
        """Return the lanes, each with its place in the order.

        A draft model's that has no caches is left out: they are in a batch.
        """
        result = []
        for which, lane in enumerate(self._lanes()):
            if lane is not None and (lane.caches or not which):
                result.append((which, lane))
        return result
