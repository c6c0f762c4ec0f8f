"""Operations for CPUs: cheaper ones in float32 on x86-64, compiled drafts.

Known to `models.lanes.install_hooks` and to nothing else: without this folder all texts
stay the same, and rounds take longer.
"""

from mlx_speculation.models.cpu.registration import OPS

__all__ = ["OPS"]
