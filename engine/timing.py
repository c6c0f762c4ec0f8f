"""Timing of one round by part, by the clock of the thread that runs it.

    draft       proposing, and waiting for the drafted tokens
    verify      waiting for the target's logits
    sampler     waiting from there on until the tokens are chosen and counted
    host        the rest: the thread builds and submits the target's graph, cuts the
                text, commits. The device may compute meanwhile, so a faster host saves
                this much time at most.

On a CPU the thread also waits while it submits a graph, since mlx takes more operations
only when it has done earlier ones. The thread's processor time of submitting counts as
host, and the rest as waiting for the logits, though part of the wait may be for the
last drafted tokens. With CUDA the thread does not wait there (docs/log/rounds.md). Its
processor time is then not read, which makes a plain step of 3 ms 1 % shorter.

A plain step submits the choice of its token together with the logits. Nearly all time
of the choice is then in `verify`, unless `explain=True` or masks are made in between.

With `explain=True` each graph is submitted when the one before it is computed, so that
the parts are exact. Rounds then take about 1 % longer (2 cores, dense demo model).
Without it, the timing costs 0.2 %.
"""

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import mlx.core as mx

T = TypeVar("T")
Part = Literal["draft", "verify", "sampler"]


class RoundSeconds(NamedTuple):
    """Seconds of a round by part."""

    draft: float = 0.0
    verify: float = 0.0
    sampler: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """The time of the round."""
        return sum(self)


NO_TIME = RoundSeconds()


class RoundClock:
    """Divides the time from `start` to `stop` into parts, without a gap.

    If submitting a graph cannot wait for the device (`waits` is False), all time of
    submitting counts as host.
    """

    def __init__(self, *, waits: bool = True) -> None:
        self._waits = waits
        self.start()

    def start(self, *, planning: float = 0.0, behind: bool = False) -> None:
        """Begin a round; `behind` tells that a step is in flight.

        `planning` are the seconds spent on the plan before this call. With a step in
        flight they count as `verify`: while the step runs, a rank may wait for others
        to agree on the plan.
        """
        self._spent = {"draft": 0.0, "verify": 0.0, "sampler": 0.0, "host": 0.0}
        self._spent["verify" if behind else "host"] = planning
        self._last = time.perf_counter()

    def note(self, part: Part | Literal["host"]) -> None:
        """Add the time since the last reading of the clock to a part."""
        now = time.perf_counter()
        self._spent[part] += now - self._last
        self._last = now

    def wait(self, part: Part, *arrays: mx.array) -> None:
        """Wait for submitted arrays; when they are computed, the part ends."""
        before = time.perf_counter()
        mx.eval(*arrays)
        now = time.perf_counter()
        self._spent["host"] += before - self._last
        self._spent[part] += now - before
        self._last = now

    def submit(self, part: Part, *arrays: mx.array) -> None:
        """Submit arrays; time spent waiting counts for the part."""
        self.hand_over(part, mx.async_eval, *arrays)

    def hand_over(self, part: Part, call: Callable[..., T], *args: Any) -> T:
        """Return the result of a call that submits a graph.

        Time in which the call waits counts for the part. A call that raises is not
        counted.
        """
        if not self._waits:
            return call(*args)
        before, busy = time.perf_counter(), time.thread_time()
        result = call(*args)
        busy = time.thread_time() - busy
        now = time.perf_counter()
        self._spent["host"] += before - self._last + busy
        self._spent[part] += now - before - busy
        self._last = now
        return result

    def stop(self) -> RoundSeconds:
        """Return the parts; the time since the clock was last read belongs to host."""
        self._spent["host"] += time.perf_counter() - self._last
        return RoundSeconds(**self._spent)
