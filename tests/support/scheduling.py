"""Scheduling of the tests' threads; imported before all else.

A worker of pytest for each core is parallel enough. Threads of a BLAS that wait for
each other would spin on the cores of other workers, so that there is one.

mlx hands each operation to a thread of its own. As a rule a thread that is woken takes
the core from the one that woke it, which is about to hand over the next operation: some
100,000 times in a test of texts. Threads of the kind chosen here wait for their turn.

mlx keeps its reference BLAS: rows are then equal bit for bit, and tests load mlx before
this package.

Processes that tests start inherit all three.

A worker keeps to a core, since waking a thread on another one costs a tenth. What it
starts may use all cores.

Garbage is not looked for until all modules are imported, since that is a fifth of the
time that they take.
"""

import gc
import os
import subprocess
from functools import wraps
from typing import Any

gc.disable()  # until conftest.pytest_collection_finish
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLX_SPECULATION_BLAS", "stock")
if hasattr(os, "SCHED_BATCH"):  # Linux
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# What the processes that tests start may use; macOS has no word for it.
cores = (
    os.sched_getaffinity(0)
    if hasattr(os, "sched_getaffinity")
    else set(range(os.cpu_count() or 1))
)


def keep_to_a_core(worker: int) -> None:
    """Let this worker have one of the cores, and the processes that it starts all."""
    core = {sorted(cores)[worker % len(cores)]}
    start: Any = subprocess.Popen.__init__

    @wraps(start)
    def start_on_all_cores(*args: Any, **options: Any) -> None:
        os.sched_setaffinity(0, cores)
        try:
            start(*args, **options)
        finally:
            os.sched_setaffinity(0, core)

    os.sched_setaffinity(0, core)
    subprocess.Popen.__init__ = start_on_all_cores  # type: ignore[method-assign]


if hasattr(os, "sched_setaffinity") and "PYTEST_XDIST_WORKER" in os.environ:
    keep_to_a_core(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")))
