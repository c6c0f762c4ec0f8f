"""Availability of the kernels for few rows."""

import functools

import mlx.core as mx

from mlx_speculation.models.cuda.attention import attention
from mlx_speculation.models.cuda.matmul import Weight, products
from mlx_speculation.warn import notice


@functools.cache
def kernels_compile() -> bool:
    """Return whether mlx can compile kernels here; if not, notify the user once.

    The compiler needs header files that not every installation has.
    """
    try:
        ones = mx.ones((2, 64), mx.bfloat16)
        heads = ones.reshape(1, 1, 2, 64)
        mx.eval(
            products(ones, [Weight((ones,), 0)]),
            attention(heads, heads, heads, 1.0, "causal", contiguous=True),
        )
    except RuntimeError as error:
        notice(
            "The CUDA kernels for few rows are not used, since mlx could not compile "
            f"one: {str(error).strip().splitlines()[0]}. The text is the same. "
            "Install the header files of the CUDA toolkit for more speed."
        )
        return False
    return True
