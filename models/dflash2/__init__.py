"""DFlash2 drafters: DFlash with convolutions in its layers, and a selector.

The parts that both share are in `models.dflash`.
"""

from mlx_speculation.models.dflash2.config import is_dflash2
from mlx_speculation.models.dflash2.head import DFlash2
from mlx_speculation.models.dflash2.load import load_dflash2

__all__ = ["DFlash2", "is_dflash2", "load_dflash2"]
