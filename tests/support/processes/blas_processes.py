"""Processes that choose a BLAS, and a check of the BLAS that mlx calls.

A BLAS is chosen once per process, so each case runs in a new process.
"""

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from mlx_speculation.blas.openblas_wheel import wheel_version
from mlx_speculation.environment import installed
from support.processes.programs import WITHOUT_TORCH

# On macOS mlx always uses Accelerate.
linux = pytest.mark.skipif(sys.platform != "linux", reason="BLAS is fixed on macOS")
# The extra 'cpu' installs both mlx's CPU backend and the wheel scipy-openblas32. So if
# the backend is installed and the wheel is missing, tests fail.
EXPECTED = wheel_version() is not None or installed("mlx-cpu") is not None
with_wheel = pytest.mark.skipif(
    not EXPECTED, reason="scipy-openblas32 comes with the extra 'cpu'"
)
with_openblas = pytest.mark.skipif(
    not EXPECTED and ctypes.util.find_library("openblas") is None,
    reason="there is no OpenBLAS, neither the wheel's nor the system's",
)

# The reference BLAS rounds each product and adds in order. OpenBLAS uses fused and
# vector instructions.
ADDS_UP_IN_ORDER = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
row = mx.random.normal((512,), key=mx.random.key(0))
weights = mx.random.normal((512, 256), key=mx.random.key(1))
in_order = mx.zeros(256)
for value, line in zip(row, weights):
    in_order = in_order + value * line
print(mx.array_equal((row[None] @ weights)[0], in_order).item())
"""


def run_python(code: str, *options: str, **environment: str | None) -> list[str]:
    """Run code in a new process, without torch; return the lines that it printed.

    The code must exit with 0. A variable of the environment that is None is removed.
    """
    done = subprocess.run(
        [sys.executable, *options, "-c", WITHOUT_TORCH + code],
        capture_output=True,
        text=True,
        check=False,
        env=changed_environment(environment),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    both = {**os.environ, **changes}
    return {name: value for name, value in both.items() if value is not None}
