"""Operations for CPUs: float32 attention on x86-64, and compiled draft models.

Without them all texts stay the same, but rounds take longer.
"""

from mlx_speculation.models.cpu.registration import OPS

__all__ = ["OPS"]
