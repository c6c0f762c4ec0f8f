"""Rehearsal of the shapes of rounds, so that their kernels are compiled in advance.

A shape is a number of positions. If cuDNN computes attention (`plans_by_keys`), a shape
also has a range of keys, such as 513 to 1,024 (`whole_steps`). All shapes of the
current range are rehearsed before the first round. From `AHEAD` tokens before the next
range on, each round rehearses one shape of that range. Drafts are limited to rehearsed
lengths, so no round and no measured cost includes a compilation.

    300 tokens, before the first round   1 to 512 keys: 1 2 3 4 6 8 12 16 24 positions
    490 tokens, one in each round        513 to 1,024 keys: 1 position, 2 positions, ...
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

# (thread, positions, keys or 0); mlx keeps the plans of each thread separately.
Shape = tuple[int, int, int]
# The rehearsal of a range of keys begins this many tokens before the range.
AHEAD = 32


class Warmup:
    """Rehearses the shapes of one stream's rounds, for drafts up to `longest` tokens.

    `statistics` counts the time. All streams of a generator share `met`, the rehearsed
    shapes. `read_prompt` lets the drafter read the prompt, then calls `draft`.
    """

    def __init__(
        self, target: Lane, longest: int, statistics: Statistics, met: set[Shape]
    ) -> None:
        self._target, self._longest = target, longest
        self._statistics, self._met = statistics, met
        self._sizes = sorted({row_size(n + 1) for n in range(longest + 1)})
        self._by_keys: bool | None = None  # None: before the first round
        self.read_prompt: Callable[[], bool] | None = None

    def limit(self, context: int, limit: int) -> int:
        """Rehearse what is due; return the longest rehearsed length up to `limit`."""
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
        """Let a drafter that has read the prompt draft once, and discard the draft."""
        if _drafted() not in self._met:
            self._met.add(_drafted())
            draft = drafter.propose(sequence, self._longest, choices)
            mx.eval(draft.tokens)
            drafter.discard()

    def _rehearse_one(self, context: int) -> None:
        """Rehearse one shape of this range of keys or, near its end, of the next."""
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
    """Return the key in `met` of a rehearsed draft of this thread."""
    return threading.get_ident(), 0, 0


@functools.cache
def _say_once() -> None:
    notice(
        "Compiling kernels: the first text of a process begins a few seconds late, and "
        "the first on a machine later still."
    )
