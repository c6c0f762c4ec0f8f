"""One stream's use of a prefix cache: look up, take restore points, fill."""

import sys
import threading
from collections.abc import Callable, Sequence

from mlx_speculation.caches import PrefixCache
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
    ) -> None:
        self._cache, self._lanes, self._reach = cache, lanes, reach
        self._keys = keys

    def begin(self, tokens: Sequence[int]) -> int:
        """Let the lanes hold what is known of `tokens`, but not the last token.

        Returns:
            How many tokens the target's lane holds.
        """
        self._thread = threading.get_ident()
        for which, lane in self._each():
            held = self._cache.lookup(which, self._named(tokens)[:-1])
            if held is not None:
                lane.resume(held)
            if self._cache.stateful(which):
                lane.points = RestorePoints(self._cache)
                lane.points.resumed(lane.seen)
        target = self._lanes()[0]
        assert target is not None
        return target.seen

    def between_rounds(self) -> None:
        """Take the restore points that are due."""
        for _, lane in self._each():
            if lane.points is not None:
                lane.points.between_rounds(lane, self._reach)

    def store(self, tokens: Sequence[int]) -> None:
        """Keep what the lanes hold of the known `tokens`."""
        for which, lane in self._each():
            points = None if lane.points is None else lane.points.running
            named = self._named(tokens)[: lane.seen]
            self._cache.store(which, named, lane.caches, points)

    def store_dropped(self, tokens: Sequence[int]) -> None:
        """Keep it when the stream is dropped before its end, if that is safe here.

        The collector may drop it in another thread, which cannot evaluate what this
        one's streams have not computed yet, or while the interpreter shuts down.
        """
        if self._thread == threading.get_ident() and not sys.is_finalizing():
            self.store(tokens)

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
