"""How many threads OpenBLAS gets, and what its idle ones do.

The threads of a product wait for each other by `sched_yield`. That is short only as
long as each of them has a core: a thread that waits for one that has lost its core
goes on for a slice of the scheduler's time, some milliseconds, in each of the hundreds
of products of a forward. With as many threads as cores, a second such process takes
nine tenths of the speed of both (docs/log/linux_cpu.md). So OpenBLAS gets half the
cores, at least one, and one where other programs leave less than that half idle. Two
processes then have room, and the third takes one thread.

The number is chosen once in a process: a product's last bits depend on it, and a text
is not to change with the load in its middle.

An idle thread turns in a circle too, for some 100 ms. Where two threads are asked for
on two cores, it takes the second one from mlx's own threads, which build the graph and
compute it, and plain steps and rounds took 5 to 30 % longer. So there it has to
sleep at once, unless `OPENBLAS_THREAD_TIMEOUT` is set. From four cores on that makes
rounds slower, since all of them are woken for each product.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mlx_speculation.environment import usable_cores

NUM_THREADS, TIMEOUT = "OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"
# Where OpenBLAS looks for a number, in its order.
NAMES = (
    NUM_THREADS,
    "OPENBLAS_DEFAULT_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "OMP_NUM_THREADS",
)
_TWO_CORES = 2
# After how many ticks of the processor's clock a thread without work sleeps, as a
# power of two. From 8 to 14 no difference was seen.
_SLEEP_SOON = 10
# The number of running threads changes within milliseconds.
_LOOKS, _APART = 5, 0.01
_LOAD = Path("/proc/loadavg")


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """What OpenBLAS is given when it is loaded."""

    count: int | None  # threads of a product; None: what the user's environment names
    why: str  # one line for people
    # 2 to this power are the clock ticks after which an idle thread sleeps; None:
    # OpenBLAS's own, or the user's.
    sleep_after: int | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables that OpenBLAS reads it from."""
        given = {NUM_THREADS: self.count, TIMEOUT: self.sleep_after}
        return {name: str(value) for name, value in given.items() if value is not None}

    def __str__(self) -> str:
        """Describe it in one line."""
        if self.sleep_after is None:
            return self.why
        return f"{self.why}; idle ones sleep after 2^{self.sleep_after} ticks"


def plan_threads(
    cores: int, idle: int | None, environment: Mapping[str, str]
) -> ThreadPlan:
    """Decide how many threads OpenBLAS gets.

    For example 4 of 8 cores, but 1 where other programs leave 3 idle.

    Args:
        cores: that this process may use.
        idle: cores of the machine on which nothing else runs now; None: not known.
        environment: the variables of this process.
    """
    for name in NAMES:
        if (count := _number(environment.get(name))) > 0:
            spins = cores == _TWO_CORES and count > 1
            soon = spins and TIMEOUT not in environment
            sleep_after = _SLEEP_SOON if soon else None
            return ThreadPlan(None, f"{name} is {environment[name]}", sleep_after)
    half = cores // 2
    may = f"this process may use {cores} core{'s' if cores != 1 else ''}"
    if half <= 1:
        return ThreadPlan(1, f"1 thread: {may}")
    if idle is not None and idle < half:
        return ThreadPlan(1, f"1 thread: {may}, and other programs left {idle} idle")
    return ThreadPlan(half, f"{half} threads: {may}")


def threads_here() -> ThreadPlan:
    """Decide it for this process; it takes 40 ms where there are four cores or more."""
    cores = usable_cores()
    idle = idle_cores() if plan_threads(cores, None, os.environ).count != 1 else None
    return plan_threads(cores, idle, os.environ)


def idle_cores() -> int | None:
    """Return on how many cores of the machine nothing but this thread runs.

    The median of five looks, since the number changes within milliseconds; never below
    0, and None where Linux does not say.
    """
    running = []
    for look in range(_LOOKS):
        if look:
            time.sleep(_APART)
        try:
            # For example "0.50 0.18 0.08 3/512 4711": 3 run, this thread is one.
            running.append(int(_LOAD.read_text().split()[3].partition("/")[0]) - 1)
        except (OSError, ValueError, IndexError):
            return None
    return max(0, (os.cpu_count() or 1) - int(median(running)))


def _number(text: str | None) -> int:
    """Return the number of threads that OpenBLAS takes a variable's value for."""
    number = (text or "").strip().partition(",")[0]  # "4,2" of OpenMP is 4
    return int(number) if number.isdigit() else 0
