"""The threads of OpenBLAS: their number for a text, and the time until they sleep.

The threads of a matrix product spin until all are done. If one has lost its core, the
others spin for some milliseconds, in each of the hundreds of products of a forward. Two
processes, each with as many threads as cores, lose nine tenths of their speed
(docs/log/linux_cpu.md). So a text gets all cores only if other programs leave them idle
when the text starts. Else it gets half of the cores, or one thread if fewer than half
are idle.

The last bits of a product depend on the number of threads. So texts in exact mode get
the same number at any load. While texts run, only a text in exact mode changes it.

An idle thread also spins, for some 100 ms. On two cores this takes a core from mlx's
own threads: steps took 5 to 30 % longer. So on two cores threads sleep at once, unless
`OPENBLAS_THREAD_TIMEOUT` is set. On more cores sleeping at once would slow down
rounds: each product would have to wake all threads.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NUM_THREADS, TIMEOUT = "OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"
# Variables from which OpenBLAS reads a number of threads; the first one set is used.
NAMES = (
    NUM_THREADS,
    "OPENBLAS_DEFAULT_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "OMP_NUM_THREADS",
)
_TWO_CORES = 2
# An idle thread sleeps after 2^_SLEEP_SOON clock ticks of the processor. Exponents from
# 8 to 14 made no difference.
_SLEEP_SOON = 10
# Seconds over which the load of other programs is measured. `_STAT` usually counts
# hundredths of a second.
_SHORTEST, _LONGEST = 0.05, 2.0
_IDLE = 0.4  # a core is idle if other programs use less than this part of it
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """The numbers of threads that a text can get."""

    # The number in exact mode, or if other programs run; None: the user's environment
    # decides
    count: int | None
    most: int | None  # the number if all cores are idle; None if `count` is None
    why: str  # the reason, one line for people
    # Idle threads sleep after 2^sleep_after ticks; None: the user's or OpenBLAS's time
    sleep_after: int | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables that OpenBLAS reads when it is loaded."""
        given = {NUM_THREADS: self.most, TIMEOUT: self.sleep_after}
        return {name: str(value) for name, value in given.items() if value is not None}

    def threads(self, idle: float | None) -> int:
        """Return the number for a text; `idle`: number of idle cores, None: unknown."""
        assert self.count is not None
        assert self.most is not None
        if idle is None:
            return self.count
        if idle > self.most - _IDLE:
            return self.most
        return self.count if idle > self.count - _IDLE else 1

    @property
    def numbers(self) -> str | None:
        """A text such as "2 to 4 threads"; None: one number, or the user sets it."""
        if self.count is None or self.count == self.most:
            return None
        return f"{self.count} to {self.most} threads"

    def __str__(self) -> str:
        """Describe the plan in one line."""
        if self.sleep_after is None:
            return self.why
        return f"{self.why}; idle ones sleep at once"


def plan_threads(cores: int, environment: Mapping[str, str]) -> ThreadPlan:
    """Return the plan of a process that may use `cores` cores."""
    soon = None if TIMEOUT in environment or cores != _TWO_CORES else _SLEEP_SOON
    for name in NAMES:
        if (count := _number(environment.get(name))) > 0:
            why = f"{name} is {environment[name]}"
            return ThreadPlan(None, None, why, soon if count > 1 else None)
    may = f"this process may use {cores} core{'s' if cores != 1 else ''}"
    if cores == 1:
        return ThreadPlan(1, 1, f"1 thread: {may}")
    half = cores // 2
    why = f"{half} or {cores} threads: {may}, and all of them for a text that starts "
    return ThreadPlan(half, cores, f"{why}while other programs leave them idle", soon)


class TextThreads:
    """The present number of threads of OpenBLAS, set when a text starts.

    `set_count` is `openblas_set_num_threads`. `idle_cores` returns the number of cores
    that other programs leave idle; None: unknown.
    """

    def __init__(
        self,
        plan: ThreadPlan,
        set_count: Callable[[int], object],
        idle_cores: Callable[[], float | None],
    ) -> None:
        self.plan = plan
        self._set_count, self._idle_cores = set_count, idle_cores
        self._texts = {True: 0, False: 0}  # running texts, by `exact`
        self._lock = threading.Lock()
        self._now = 0
        if plan.count is not None:
            self._set(plan.count)

    @contextmanager
    def text(self, *, exact: bool) -> Iterator[None]:
        """Set the number for a text; only exact mode changes it while texts run."""
        if self.plan.count is None:
            yield
            return
        with self._lock:
            if exact:
                self._set(self.plan.count)
            elif not any(self._texts.values()):
                self._set(self.plan.threads(self._idle_cores()))
            self._texts[exact] += 1
        try:
            yield
        finally:
            with self._lock:
                self._texts[exact] -= 1

    def _set(self, count: int) -> None:
        if count != self._now:
            self._set_count(count)
            self._now = count


class OtherPrograms:
    """The load of other programs on a Linux machine."""

    def __init__(self) -> None:
        self._before = self._sample()

    def idle_cores(self) -> float | None:
        """Return the number of cores that other programs left idle; None: not known.

        The load is measured since the last call, or over the next 50 ms if that call
        was too recent or too long ago.
        """
        now = self._sample()
        if self._before is None or now is None:
            return None
        if not _SHORTEST <= now[0] - self._before[0] <= _LONGEST:
            time.sleep(_SHORTEST)
            self._before, now = now, self._sample() or now
        seconds, busy, process = (b - a for a, b in zip(self._before, now, strict=True))
        self._before = now
        others = max(0.0, busy - process) / max(seconds, 1e-9)
        return max(0.0, (os.cpu_count() or 1) - others)

    def _sample(self) -> tuple[float, float, float] | None:
        """Return seconds: the clock, all cores' busy time, this process's CPU time."""
        try:
            # In ticks: user, nice, system, idle, waiting for a disk, two of interrupts
            numbers = [
                int(each) for each in _STAT.read_text().split("\n")[0].split()[1:8]
            ]
            busy = sum(numbers) - numbers[3] - numbers[4]
            ticks = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None
        return time.monotonic(), busy / ticks, time.process_time()


def _number(text: str | None) -> int:
    """Return the number of threads in a variable's value; 0: none."""
    number = (text or "").strip().partition(",")[0]  # "4,2" of OpenMP is 4
    return int(number) if number.isdigit() else 0
