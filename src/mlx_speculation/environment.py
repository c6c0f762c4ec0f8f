"""What figures are measured on: the machine, and the versions that decide them."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("mlx", "mlx-lm", "transformers", "mlx-speculation")


def machine() -> dict[str, Any]:
    """Describe the machine; mlx is imported."""
    import mlx.core as mx

    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "device_name": mx.device_info().get("device_name"),
    }


def versions() -> dict[str, str]:
    """Return the versions that decide figures."""
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def installed(package: str) -> str | None:
    """Return the version of a package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cores() -> int | None:
    """Return how many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cpu_model() -> str:
    """Return the name of the processor."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
