"""How the threads of the tests share the processor; imported before all else.

A worker of pytest for each core is parallel enough. Threads of a BLAS that wait for
each other would spin on the cores of other workers, so that there is one.

mlx hands each operation to a thread of its own. As a rule a thread that is woken takes
the core from the one that woke it, which is about to hand over the next operation: some
100,000 times in a test of texts. Threads of the kind chosen here wait for their turn.

To wake a thread on another core costs more than most operations of a tiny model, and on
cores that others keep busy it waits there. So each worker stays on a core: a test of
texts takes two thirds of the processor's time, and a third of that of the clock.

Processes that tests start inherit all of it.
"""

import os


def core_of(worker: str, cores: set[int]) -> int:
    """Return the core of a worker of pytest: "gw0" has the first, and so on around."""
    return sorted(cores)[int(worker.removeprefix("gw")) % len(cores)]


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if hasattr(os, "SCHED_BATCH"):  # Linux
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "master")
    if worker != "master":
        os.sched_setaffinity(0, {core_of(worker, os.sched_getaffinity(0))})
