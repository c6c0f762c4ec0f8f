"""The BLAS of a program that chooses none itself, for `mlx_speculation.before_mlx`.

The variable `MLX_SPECULATION_BLAS` chooses for it: "auto", which is the default,
"openblas" or "stock". Nothing is done where mlx computes with CUDA, and where the
program has put a BLAS in front.
"""

import os
import sys
import warnings
from typing import cast

from mlx_speculation.blas.choose import BlasName, blas_in_use, chosen_blas, use_blas
from mlx_speculation.blas.loaded import library_in_front
from mlx_speculation.blas.openblas_wheel import wheel_version
from mlx_speculation.environment import installed
from mlx_speculation.errors import BlasNotice

VARIABLE = "MLX_SPECULATION_BLAS"
_CUDA = ("mlx-cuda-13", "mlx-cuda-12")


def choose_blas() -> None:
    """Choose a BLAS, just before mlx is loaded.

    Raises:
        BlasError: the environment asks for OpenBLAS, and it cannot be had.
        InvalidRequestError: the environment asks for none of the three.
    """
    if _left():
        return
    use_blas(wanted_blas())


def say_that_mlx_came_first() -> None:
    """Warn that mlx was loaded with its reference BLAS, if OpenBLAS is installed.

    The warning stands where the program uses this package.
    """
    if _left() or wheel_version() is None:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    warnings.warn_explicit(
        f"mlx was imported before mlx_speculation, so it has the {blas_in_use()}: on "
        "this CPU decoding in float32 takes 2 to 6 times as long as with OpenBLAS, and "
        "drafts do not pay. Import mlx_speculation before mlx and mlx_lm; or set "
        f"{VARIABLE}=stock to keep this BLAS and not to read this.",
        BlasNotice,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def wanted_blas() -> BlasName:
    """Return what the environment asks for; whether it can be had is not looked at."""
    return cast(BlasName, os.environ.get(VARIABLE) or "auto")


def _left() -> bool:
    """Return whether the BLAS is somebody else's choice, or does not matter."""
    return (
        chosen_blas() is not None
        or wanted_blas() == "stock"
        or library_in_front() is not None
        or any(installed(package) is not None for package in _CUDA)
    )


def _is_inside(module: str) -> bool:
    """Return whether a module is of this package, or of what imports modules."""
    return module.partition(".")[0] in ("mlx_speculation", "importlib")
