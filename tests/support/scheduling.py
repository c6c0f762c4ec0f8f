"""Scheduling of the tests' threads; imported before all else.

Each core has a worker of pytest.
- A BLAS gets one thread: waiting threads would spin on the cores of other workers.
- By default a woken thread of mlx takes the core from the thread that is about to hand
  over the next operation, 100,000 times in a test of texts. With SCHED_BATCH it waits.
- mlx keeps its reference BLAS: a row of a product has the same bits as alone.
- A worker is pinned to a core: otherwise a tenth of its time goes into waking threads
  on other cores.
- The garbage collector is off until all modules are imported: it would take a fifth of
  the time of the imports.

Processes that tests start inherit the thread limit, SCHED_BATCH and the BLAS, but they
can use all cores.
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


# All cores that this process may use; macOS has no call that returns them.
cores = (
    os.sched_getaffinity(0)
    if hasattr(os, "sched_getaffinity")
    else set(range(os.cpu_count() or 1))
)


def keep_to_a_core(worker: int) -> None:
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
