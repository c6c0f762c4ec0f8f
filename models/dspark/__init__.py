"""DSpark drafters: blocks whose drafts depend on the draft before.

The packagings of config.json, GGUF, the module, and what tells how it is read. The
parts that they share with DFlash are in `models.dflash`.
"""

from mlx_speculation.models.dspark.config import is_dspark
from mlx_speculation.models.dspark.gguf import gguf_file
from mlx_speculation.models.dspark.head import DSpark, DSparkHead
from mlx_speculation.models.dspark.load import load_dspark

__all__ = ["DSpark", "DSparkHead", "gguf_file", "is_dspark", "load_dspark"]
