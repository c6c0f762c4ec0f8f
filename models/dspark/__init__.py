"""DSpark drafters: blocks in which each drafted token depends on the one before.

The parts that DSpark shares with DFlash are in `models.dflash`.
"""

from mlx_speculation.models.dspark.config import is_dspark
from mlx_speculation.models.dspark.gguf import gguf_file
from mlx_speculation.models.dspark.head import DSpark, DSparkHead
from mlx_speculation.models.dspark.load import load_dspark

__all__ = ["DSpark", "DSparkHead", "gguf_file", "is_dspark", "load_dspark"]
