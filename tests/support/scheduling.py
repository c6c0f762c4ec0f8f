"""How the threads of the tests share the processor; imported before all else.

A worker of pytest for each core is parallel enough. Threads of a BLAS that wait for
each other would spin on the cores of other workers, so that there is one.

mlx hands each operation to a thread of its own. As a rule a thread that is woken takes
the core from the one that woke it, which is about to hand over the next operation: some
100,000 times in a test of texts. Threads of the kind chosen here wait for their turn.

mlx keeps its reference BLAS: rows are then equal bit for bit, and tests load mlx before
this package.

Processes that tests start inherit all three.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLX_SPECULATION_BLAS", "stock")
if hasattr(os, "SCHED_BATCH"):  # Linux
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
