"""Operations for CPUs: float32 attention on x86-64, and compiled draft models.

Only `models.ops.dispatch` uses this package: without it all texts stay the same, but
rounds take longer.
"""

from mlx_speculation.models.cpu.registration import OPS

__all__ = ["OPS"]
