"""Operations for NVIDIA GPUs: kernels for few rows, and padding to few shapes.

Only `models.ops.dispatch` imports this package. Without it rounds take longer.
"""

from mlx_speculation.models.cuda.registration import OPS

__all__ = ["OPS"]
