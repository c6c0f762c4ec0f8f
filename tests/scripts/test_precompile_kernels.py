"""The header of mlx's kernels is precompiled once, and again after a change."""

import os
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/precompile_kernels.sh"
HEADER = "include/mlx/backend/cpu/compiled_preamble.h"

gcc = pytest.mark.skipif(
    b"Free Software"
    not in subprocess.run(["g++", "--version"], capture_output=True).stdout
    if shutil.which("g++")
    else True,
    reason="the script precompiles for GCC only",
)


@pytest.fixture
def header(tmp_path: Path) -> Path:
    path = tmp_path / "lib/python3.11/site-packages/mlx" / HEADER
    path.parent.mkdir(parents=True)
    path.write_text("#pragma once\ninline int one() { return 1; }\n")
    return path


def run(venv: Path, **more: str) -> None:
    subprocess.run(["sh", SCRIPT, venv], env=os.environ | more, check=True)


@gcc
def test_it_is_compiled_once_and_again_when_it_is_newer(
    header: Path, tmp_path: Path
) -> None:
    made = header.with_suffix(".h.gch")
    run(tmp_path)
    first = made.stat().st_mtime_ns
    run(tmp_path)
    assert made.stat().st_mtime_ns == first
    os.utime(header, ns=(first, first + 10**9))
    run(tmp_path)
    assert made.stat().st_mtime_ns != first
    assert sorted(path.name for path in header.parent.iterdir()) == [
        header.name,
        made.name,
    ]


@gcc
def test_a_header_that_does_not_compile_leaves_nothing(
    header: Path, tmp_path: Path
) -> None:
    header.write_text("int one( {\n")
    run(tmp_path)
    assert list(header.parent.iterdir()) == [header]


def test_without_a_compiler_it_does_nothing(header: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "rm", "grep"):
        (tools / name).symlink_to(shutil.which(name) or name)
    run(tmp_path, PATH=str(tools))
    assert list(header.parent.iterdir()) == [header]


def test_that_of_this_mlx_is_newer_than_it() -> None:
    """GCC silently uses an old precompiled header; `make environment` renews it."""
    header = Path(mx.__file__).parent / HEADER
    made = header.with_suffix(".h.gch")
    assert not made.exists() or made.stat().st_mtime > header.stat().st_mtime
