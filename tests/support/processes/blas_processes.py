"""Processes that choose a BLAS, and how to see which one mlx calls.

A BLAS is chosen once per process, so each case runs in one of its own.
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

# macOS has Accelerate and nothing to choose.
linux = pytest.mark.skipif(sys.platform != "linux", reason="chooses a BLAS on Linux")
# The extra 'cpu' brings both: beside mlx's backend, a missing wheel is a failure.
EXPECTED = wheel_version() is not None or installed("mlx-cpu") is not None
with_wheel = pytest.mark.skipif(
    not EXPECTED, reason="scipy-openblas32 comes with the extra 'cpu'"
)
with_openblas = pytest.mark.skipif(
    not EXPECTED and ctypes.util.find_library("openblas") is None,
    reason="there is no OpenBLAS, neither the wheel's nor the system's",
)

# The reference BLAS rounds each product and adds it up in order. OpenBLAS has fused
# and vector instructions, on every processor that it has kernels for.
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

    Args:
        code: of a program that ends well and says nothing on standard error.
        options: of Python.
        environment: variables to be set, or taken away (None).
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
    """Return the environment of this process with some variables set or taken away."""
    both = {**os.environ, **changes}
    return {name: value for name, value in both.items() if value is not None}
