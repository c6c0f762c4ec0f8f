"""The BLAS in the global symbol scope of this process.

A library that is loaded later, such as mlx, looks for symbols there first. The BLAS of
mlx's own libraries is not in this scope.
"""

import ctypes

_PRODUCT, _OPENBLAS = "cblas_sgemm", "openblas_get_config"
_PARALLEL = {0: "single-threaded", 1: "pthread", 2: "OpenMP"}


class _Place(ctypes.Structure):
    """Result of `dladdr`: Dl_info."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def library_in_front() -> str | None:
    """Return the file of the BLAS in the global scope; None: there is none."""
    return _file_of(_PRODUCT)


def describe_openblas(threads: str | None = None) -> str | None:
    """Describe the OpenBLAS in use; None: another BLAS is in use, or none.

    `threads` is a text such as "4 threads"; None: the present number.
    """
    file = _file_of(_OPENBLAS)
    if file is None or file != library_in_front():
        return None
    everything = ctypes.CDLL(None)
    get_config = everything.openblas_get_config
    get_config.restype = ctypes.c_char_p
    # For example b"OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH Haswell MAX_THREADS=64".
    version = " ".join(get_config().decode().split()[:2])
    get_kernels = everything.openblas_get_corename
    get_kernels.restype = ctypes.c_char_p
    kind = _PARALLEL.get(everything.openblas_get_parallel(), "unknown threads")
    if threads is None:
        count = everything.openblas_get_num_threads()
        threads = f"{count} thread{'s' if count != 1 else ''}"
    return f"{version} ({get_kernels().decode()}, {kind}, {threads})"


def _file_of(symbol: str) -> str | None:
    """Return the file of a symbol in the global scope; None: there is none."""
    everything = ctypes.CDLL(None)
    try:
        address = ctypes.cast(getattr(everything, symbol), ctypes.c_void_p)
    except AttributeError:
        return None
    place = _Place()
    if not everything.dladdr(address, ctypes.byref(place)) or place.file is None:
        return None
    result: bytes = place.file
    return result.decode(errors="surrogateescape")
