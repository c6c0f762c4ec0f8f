"""Automatic choice of a BLAS, for programs that choose none themselves.

The environment variable `MLX_SPECULATION_BLAS` is "auto" (the default), "openblas" or
"stock". Nothing is chosen if mlx computes with CUDA, or if the program has loaded
another BLAS before mlx.
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
    """Choose a BLAS, before mlx is loaded.

    Raises:
        BlasError: the variable is "openblas", and OpenBLAS cannot be used.
        InvalidRequestError: the variable has none of the three values.
    """
    if _left():
        return
    use_blas(wanted_blas())


def say_that_mlx_came_first() -> None:
    """Warn that mlx was loaded with its reference BLAS, if the OpenBLAS wheel is there.

    The warning names the line that imports this package.
    """
    if _left() or wheel_version() is None:
        return
    frame, ours = sys._getframe(1), ("mlx_speculation", "importlib")
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        frame = frame.f_back
    warnings.warn_explicit(
        f"mlx was imported before mlx_speculation, so it has the {blas_in_use()}: on "
        "this CPU decoding in float32 takes 2 to 6 times as long as with OpenBLAS, and "
        "drafts do not pay. Import mlx_speculation before mlx and mlx_lm; or set "
        f"{VARIABLE}=stock to keep this BLAS without this warning.",
        BlasNotice,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def wanted_blas() -> BlasName:
    """Return the value of the environment variable, unchecked."""
    return cast(BlasName, os.environ.get(VARIABLE) or "auto")


def _left() -> bool:
    """Return whether the BLAS is left as it is.

    That is so if one is chosen or loaded already, if the variable is "stock", or if an
    mlx for CUDA is installed.
    """
    return (
        chosen_blas() is not None
        or wanted_blas() == "stock"
        or library_in_front() is not None
        or any(installed(package) is not None for package in _CUDA)
    )
