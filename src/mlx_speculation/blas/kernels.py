"""The kernels of OpenBLAS that a processor can run.

An OpenBLAS that is older than the processor does not know it, and may choose very old
kernels: 0.3.21 of Debian 12 runs SSE3 on an Intel server of 2023, and decoding took 1.4
times as long. So this package names the kernels in `OPENBLAS_CORETYPE`, by the flags of
the processor, unless the user has set that variable.
"""

import _ctypes
import ctypes
import os
from pathlib import Path

CORE_TYPE = "OPENBLAS_CORETYPE"
# Best first: OpenBLAS's name of kernels, the flags in /proc/cpuinfo that they need, and
# the names of all kernels that are as good.
_KERNELS = [
    (
        "SkylakeX",
        {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"},
        {"SkylakeX", "Cooperlake", "SapphireRapids"},
    ),
    ("Haswell", {"avx2", "fma"}, {"Haswell", "Zen"}),
]


def kernels_to_name(library: str) -> str | None:
    """Return kernels for `OPENBLAS_CORETYPE` that a library would not choose itself.

    The library is opened and closed again, which is safe while no OpenBLAS is in use.

    Returns:
        OpenBLAS's name of better kernels; None: the library's choice is the best that
        the processor can run, or the environment names kernels.

    Raises:
        OSError: the library cannot be opened.
    """
    if os.environ.get(CORE_TYPE):
        return None
    opened = ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL)
    try:
        return better_than(core_of(opened), processor_flags())
    finally:
        _ctypes.dlclose(opened._handle)


def better_than(core: str, flags: set[str]) -> str | None:
    """Return the best kernels for a processor; None: none are better than `core`."""
    for best, needed, as_good in _KERNELS:
        if core in as_good:
            return None
        if needed <= flags:
            return best
    return None


def processor_flags() -> set[str]:
    """Return the processor's flags by Linux; empty if Linux does not give them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def core_of(library: ctypes.CDLL) -> str:
    """Return OpenBLAS's name of the kernels in use."""
    get_name = library.openblas_get_corename
    get_name.restype = ctypes.c_char_p
    name: bytes = get_name()
    return name.decode()
