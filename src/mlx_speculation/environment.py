"""This machine: cores, versions, and the folder for what may be lost."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
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
        **{package: installed(package) or "unknown" for package in PACKAGES},
    }


def free_memory() -> int | None:
    """Return the bytes that arrays can still take; None: unknown. mlx is imported."""
    import mlx.core as mx

    if mx.default_device() == mx.gpu:
        info = mx.device_info()
        names = ("max_recommended_working_set_size", "total_memory", "memory_size")
        total = next((int(info[name]) for name in names if info.get(name)), None)
        return None if total is None else max(0, total - mx.get_active_memory())
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        # mlx keeps what was freed, which the system counts as used.
        return int(fields["MemAvailable"].split()[0]) * 1024 + mx.get_cache_memory()
    except (OSError, ValueError, KeyError):
        return None


def missing_backend(error: ImportError) -> str | None:
    """Return what to do about an mlx that cannot be imported; None: it is not mlx."""
    if (error.name or "").partition(".")[0] != "mlx" and "libmlx" not in str(error):
        return None
    extra = "" if sys.platform == "darwin" else "[cpu]"
    gpu = "" if sys.platform == "darwin" else " or '.[cuda13]' with an NVIDIA GPU"
    return (
        f"mlx cannot be imported ({error}). It needs a backend: install "
        f"'mlx-speculation{extra}' (from a checkout: pip install '.{extra}'){gpu}."
    )


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


def usable_cores() -> int:
    """Return how many cores' worth of time this process gets, at least 1.

    Of the cores that it may use, a container's or a service's quota of time can leave
    fewer: of 1.5 the whole one is returned.
    """
    quota = cpu_quota()
    allowed = cores() or 1
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many cores' worth of time the control groups of this process allow.

    Returns:
        The smallest quota of the group and those above it; None: there is none.
    """
    result = []
    for files, path in _cpu_groups(root):
        # Within a container the path may be the machine's; its own group is the root.
        for group in (path, *path.parents):
            quota = _quota(root / files / group.relative_to("/"))
            if quota is not None:
                result.append(quota)
    return min(result, default=None)


def _cpu_groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield folders under which groups have quotas, with the group of this process."""
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
    """Return the quota of one group, in cores."""
    try:
        if (two := group / "cpu.max").is_file():
            quota, period = two.read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError):  # not there, or "max"
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
    """Return where this package keeps what may be lost at any time.

    That is the folder which MLX_SPECULATION_CACHE names, else mlx-speculation under
    XDG_CACHE_HOME or ~/.cache, by the XDG base directory rules. None: nobody knows
    where the user's home is.
    """
    named = os.environ.get("MLX_SPECULATION_CACHE")
    if named:
        return Path(named)
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():  # such a path is to be ignored, as the rules say
        try:
            home = Path.home() / ".cache"
        except RuntimeError:
            return None
    return home / "mlx-speculation"
