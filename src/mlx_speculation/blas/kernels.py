"""The kernels of OpenBLAS that a processor can run.

An OpenBLAS that is older than the processor does not know it, and may take kernels of
long ago: 0.3.21 of Debian 12 runs SSE3 on an Intel server of 2023, and decoding took
1.4 times as long. So the kernels are named to it, by what the processor says it can,
unless `OPENBLAS_CORETYPE` does so already.
"""

import _ctypes
import ctypes
import os
from pathlib import Path

CORE_TYPE = "OPENBLAS_CORETYPE"
# From the best on: OpenBLAS's name of kernels, what /proc/cpuinfo says of a processor
# that can run them, and the names of those that are as good.
_KERNELS = [
    (
        "SkylakeX",
        {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"},
        {"SkylakeX", "Cooperlake", "SapphireRapids"},
    ),
    ("Haswell", {"avx2", "fma"}, {"Haswell", "Zen"}),
]


def kernels_to_name(library: str) -> str | None:
    """Return kernels for `OPENBLAS_CORETYPE` that are better than those it would take.

    The library is opened to be asked and closed again. Legal while none is in use.

    Returns:
        OpenBLAS's name of them; None: it takes the best that the processor can run, or
        the caller's environment names some.

    Raises:
        OSError: it cannot be opened.
    """
    if os.environ.get(CORE_TYPE):
        return None
    opened = ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL)
    try:
        return better_than(core_of(opened), processor_flags())
    finally:
        _ctypes.dlclose(opened._handle)


def better_than(core: str, flags: set[str]) -> str | None:
    """Return the best kernels for a processor, if they are better than `core`."""
    for best, needed, as_good in _KERNELS:
        if core in as_good:
            return None
        if needed <= flags:
            return best
    return None


def processor_flags() -> set[str]:
    """Return what Linux says that the processor can; nothing where it does not say."""
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
