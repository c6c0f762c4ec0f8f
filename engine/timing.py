"""Timing of one round by part, by the clock of the thread that runs it.

    draft       proposing, and waiting for the drafted tokens
    verify      waiting for the target's logits
    sampler     waiting from there on until the tokens are chosen and counted
    host        the rest: the thread builds and hands over the target's graph, cuts the
                text, commits. What of it passes while the device computes costs
                nothing, so a faster host saves this much at most.

The thread waits for what the device computes in the order in which it does, and the
parts end where it is woken. On a CPU it waits while it hands over a graph too: mlx
takes more operations when it has done as many. Of handing over, the processor time of
the thread is therefore the host's, and the rest is waiting: for the logits, though
some of it may be for the last drafted tokens. With CUDA the thread was seen to compute
all the while (docs/log/rounds.md), and is not asked: a plain step of 3 ms is 1 %
shorter so.
And a plain step's choice is submitted with its logits: its time is found in `verify`,
all but nothing, unless parts are exact or a constraint has masks to make in between.

`exact` parts are those of a stream with `explain=True`. A graph is handed over there
when the one before it has been computed, which makes rounds slower: on 2 cores those of
the dense demo model by 0.8 % (4 drafted tokens) and 1.1 % (plain steps). What is done
in every stream costs 0.2 %.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import mlx.core as mx

T = TypeVar("T")
Part = Literal["draft", "verify", "sampler"]


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Seconds of a round by part; the module defines the parts."""

    draft: float = 0.0
    verify: float = 0.0
    sampler: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """The time of the round."""
        return self.draft + self.verify + self.sampler + self.host


NO_TIME = RoundSeconds()


class RoundClock:
    """Divides the time from `start` to `stop` into parts, without a gap.

    Args:
        waits: whether to hand over a graph may be to wait; if not, all of it is the
            host's.
    """

    def __init__(self, *, waits: bool = True) -> None:
        self._waits = waits
        self.start()

    def start(self, *, planning: float = 0.0, behind: bool = False) -> None:
        """Begin a round.

        Args:
            planning: seconds of the round before that: on several ranks they agree on
                a plan, which waits for a step in flight.
            behind: whether there is one.
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
        """Wait for arrays, all of them submitted, that end a part."""
        before = time.perf_counter()
        mx.eval(*arrays)
        now = time.perf_counter()
        self._spent["host"] += before - self._last
        self._spent[part] += now - before
        self._last = now

    def submit(self, part: Part, *arrays: mx.array) -> None:
        """Submit arrays; where that has to wait, it waits for a part."""
        self.hand_over(part, mx.async_eval, *arrays)

    def hand_over(self, part: Part, call: Callable[..., T], *args: Any) -> T:
        """Make a call that hands over a graph, and return what it does.

        The time that the call does not compute is a wait for a part. One that fails is
        not counted.
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
        """Return the parts; what was done since the last look is the host's."""
        self._spent["host"] += time.perf_counter() - self._last
        return RoundSeconds(**self._spent)
