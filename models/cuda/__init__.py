"""Operations for NVIDIA GPUs: kernels for few rows, and shapes that cuDNN knows.

Known to `models.lanes.install_hooks` and to nothing else: without this folder all texts
stay the same, and rounds take longer.
"""

from mlx_speculation.models.cuda.registration import OPS

__all__ = ["OPS"]
