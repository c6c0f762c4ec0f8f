"""Rounds of each shape are rehearsed before a text depends on them.

A shape is a number of positions, and where attention is planned by numbers of keys, a
step of those (`models.lanes.rehearsal`). All of the current step are rehearsed before
the first round, those of the next step, one a round, over the last `AHEAD` tokens
before it is reached. Until then drafts are cut to lengths that were rehearsed, so that
no round waits for a compiler, and no cost is measured that holds the wait.

    key steps of 512, 300 tokens held   1 2 3 4 6 8 12 16 24 positions, at once
    490 held                            1 with 512 to 1,024 keys; the round; 2; ...
"""

import functools
import threading
import time
from collections.abc import Callable

import mlx.core as mx

from mlx_speculation.caches import whole_steps
from mlx_speculation.engine.drafters.base import OpenDrafter
from mlx_speculation.engine.drafters.fault_guard import CheckedChoose
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.models import (
    Lane,
    plans_by_keys,
    rehearse,
    row_size,
    shape_of_round,
)
from mlx_speculation.warn import notice

# (thread, positions, keys or 0): mlx keeps plans for each thread by itself.
Shape = tuple[int, int, int]
# Tokens before the next step of keys from which on its shapes are rehearsed.
AHEAD = 32


class Warmup:
    """Rehearses the shapes of one stream's rounds.

    Args:
        target: the lane whose rounds they are.
        longest: no draft is longer.
        statistics: the stream's, which count the time.
        met: shapes that were rehearsed, of all streams of a generator.

    Attributes:
        read_prompt: has the drafter read the prompt, and rehearses its draft then.
    """

    def __init__(
        self, target: Lane, longest: int, statistics: Statistics, met: set[Shape]
    ) -> None:
        self._target, self._longest = target, longest
        self._statistics, self._met = statistics, met
        self._sizes = sorted({row_size(n + 1) for n in range(longest + 1)})
        self._by_keys: bool | None = None  # before the first round
        self.read_prompt: Callable[[], bool] | None = None

    def limit(self, context: int, limit: int) -> int:
        """Return the longest draft up to `limit` whose shapes were all rehearsed.

        Args:
            context: tokens that the target holds.
            limit: how many may be drafted.
        """
        if self._by_keys is None:
            self._by_keys = plans_by_keys(self._target.caches)
            _say_once()
            for rows in self._sizes:
                self._rehearse(context, rows)
            if self.read_prompt is not None and _drafted() not in self._met:
                self.read_prompt()
        elif self._by_keys:
            self._rehearse_one(context)
        most = 0
        for length in range(1, min(limit, self._longest) + 1):
            if self._shape(context, length + 1) not in self._met:
                break
            most = length
        return most

    def draft(
        self, drafter: OpenDrafter, sequence: Sequence, choices: CheckedChoose
    ) -> None:
        """Have a drafter, which has read the prompt, draft once for nothing."""
        if _drafted() not in self._met:
            self._met.add(_drafted())
            draft = drafter.propose(sequence, self._longest, choices)
            mx.eval(draft.tokens)
            drafter.discard()

    def _rehearse_one(self, context: int) -> None:
        """Rehearse a shape of this step of keys, or of the next one if it is near."""
        for rows in self._sizes:
            if self._shape(context, rows) not in self._met:
                self._rehearse(context, rows)
                return
        if whole_steps(context + 1) - context > AHEAD:
            return
        for rows in self._sizes:
            if self._shape(context + AHEAD, rows) not in self._met:
                self._rehearse(context, rows, AHEAD)
                return

    def _rehearse(self, context: int, rows: int, before: int = 0) -> None:
        started = time.perf_counter()
        shape = self._shape(context + before, rows)
        if shape in self._met or before + rows > self._target.room:
            return
        rehearse(self._target, rows, before)
        self._met.add(shape)
        counts, seconds = self._statistics, time.perf_counter() - started
        if counts.rounds:
            counts.host_seconds += seconds
        else:
            counts.prefill_seconds += seconds

    def _shape(self, context: int, rows: int) -> Shape:
        by_keys = bool(self._by_keys)
        return (threading.get_ident(), *shape_of_round(context, rows, by_keys=by_keys))


def _drafted() -> Shape:
    """Return what stands for a rehearsed draft in this thread."""
    return threading.get_ident(), 0, 0


@functools.cache
def _say_once() -> None:
    notice(
        "Compiling kernels: the first text of a process begins some seconds later, and "
        "the first on a machine some more."
    )
