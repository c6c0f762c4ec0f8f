import re
from pathlib import Path

import pytest

from mlx_speculation import environment
from mlx_speculation.environment import cpu_quota, usable_cores


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/cpu.max": "800000 100000\n",
            },
            1.5,
        ),
        (  # a container: the path is the host's, the files are in the root
            {
                "proc/self/cgroup": "3:memory:/x\n2:cpu,cpuacct:/docker/ab\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_quota_is_the_smallest_of_the_groups(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    _write(tmp_path, files)
    assert cpu_quota(tmp_path) == quota


def test_a_machine_is_described_in_words() -> None:
    said = environment.machine()
    assert re.fullmatch(r"[1-9]\d* GiB", said["memory"])
    assert said["device"] in ("cpu", "gpu")


@pytest.mark.parametrize(
    ("cores", "quota", "usable"),
    [(8, None, 8), (8, 2.5, 2), (8, 0.5, 1), (2, 16.0, 2), (None, None, 1)],
)
def test_a_quota_leaves_fewer_cores(
    cores: int | None,
    quota: float | None,
    usable: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "cores", lambda: cores)
    monkeypatch.setattr(environment, "cpu_quota", lambda: quota)
    assert usable_cores() == usable
