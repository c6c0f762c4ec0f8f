"""This machine: cores, memory, versions, and the cache folder."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("mlx", "mlx-lm", "transformers", "mlx-speculation")
DEMO_MODEL = "smollm2-135m-instruct"  # the demo's folder in the cache folder


def machine() -> dict[str, Any]:
    """Describe the machine. The call imports mlx."""
    import mlx.core as mx

    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory": f"{_memory() / 2**30:.0f} GiB",
        "platform": platform.platform(),
        "device": mx.default_device().type.name,
        "device_name": mx.device_info().get("device_name"),
    }


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect measurements."""
    return {
        "python": platform.python_version(),
        **{package: installed(package) or "unknown" for package in PACKAGES},
    }


def free_memory() -> int | None:
    """Return the bytes that arrays may still take; None: unknown. Imports mlx."""
    import mlx.core as mx

    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        names = ("max_recommended_working_set_size", "total_memory", "memory_size")
        total = next((int(info[name]) for name in names if info.get(name)), None)
        return None if total is None else max(0, total - mx.get_active_memory())
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        # mlx keeps freed memory in its cache, which the system counts as used.
        return int(fields["MemAvailable"].split()[0]) * 1024 + mx.get_cache_memory()
    except (OSError, ValueError, KeyError):
        return None


def missing_backend(error: ImportError) -> str | None:
    """Return an error text; None: it was not mlx whose import failed."""
    if (error.name or "").partition(".")[0] != "mlx" and "libmlx" not in str(error):
        return None
    extra = "" if sys.platform == "darwin" else "[cpu]"
    gpu = "" if sys.platform == "darwin" else " or '.[cuda13]' with an NVIDIA GPU"
    return (
        f"mlx cannot be imported ({error}). It needs a backend: install "
        f"'mlx-speculation{extra}' (from a checkout: pip install '.{extra}'){gpu}."
    )


def installed(package: str) -> str | None:
    """Return the version of a package; None: the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cores() -> int | None:
    """Return the number of cores that this process may run on; None: unknown."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def usable_cores() -> int:
    """Return `cores()`, or the CPU quota rounded down if it is less; at least 1."""
    quota = cpu_quota()
    allowed = cores() or 1
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process, in cores; None: no quota is set.

    It is the smallest quota of the process's control group and the group's parents.
    """
    result = []
    for files, path in _cpu_groups(root):
        # In a container the path may be the host's. The container's own group is
        # then the root, which is the last of the parents.
        for group in (path, *path.parents):
            quota = _quota(root / files / group.relative_to("/"))
            if quota is not None:
                result.append(quota)
    return min(result, default=None)


def _cpu_groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield root folders of control groups, each with this process's group."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if number == "0":  # version 2
            yield "sys/fs/cgroup", Path(path)
        elif "cpu" in controllers.split(","):
            yield "sys/fs/cgroup/cpu", Path(path)


def _quota(group: Path) -> float | None:
    """Return the quota of one group, in cores; None: no quota is set."""
    try:
        if (two := group / "cpu.max").is_file():
            quota, period = two.read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None


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


def cache_folder() -> Path | None:
    """Return the folder of cached files; None: the home folder is unknown.

    The folder is MLX_SPECULATION_CACHE, else mlx-speculation under XDG_CACHE_HOME or
    ~/.cache (XDG base directory rules).
    """
    named = os.environ.get("MLX_SPECULATION_CACHE")
    if named:
        return Path(named)
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():  # XDG rules: ignore a relative path
        try:
            home = Path.home() / ".cache"
        except RuntimeError:
            return None
    return home / "mlx-speculation"
