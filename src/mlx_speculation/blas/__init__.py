"""The BLAS that mlx multiplies float32 matrices with on a Linux CPU.

`choose` puts one in front of mlx, `automatic` does so for programs that do not ask, and
`threads` says how many threads it gets. `loaded` and `kernels` ask what is there;
`openblas_wheel` knows where a newer OpenBLAS than the system's comes from. Nothing here
imports mlx: the linker binds symbols when mlx is loaded, so the choice comes first.
"""

from mlx_speculation.blas.choose import (
    BlasChoice,
    BlasName,
    better_kernels,
    blas_in_use,
    text_threads,
    thread_settings,
    use_blas,
)

__all__ = [
    "BlasChoice",
    "BlasName",
    "better_kernels",
    "blas_in_use",
    "text_threads",
    "thread_settings",
    "use_blas",
]
