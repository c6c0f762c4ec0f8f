"""The BLAS with which mlx multiplies float32 matrices on a Linux CPU.

`choose` loads a BLAS before mlx, and `automatic` does this for programs that choose
none. `threads` sets its number of threads. `loaded` describes the BLAS in use.
`openblas_wheel` finds a newer OpenBLAS than the system's. No module here imports mlx.
"""

from mlx_speculation.blas.choose import (
    BlasChoice,
    BlasName,
    blas_in_use,
    text_threads,
    thread_settings,
    use_blas,
)

__all__ = [
    "BlasChoice",
    "BlasName",
    "blas_in_use",
    "text_threads",
    "thread_settings",
    "use_blas",
]
