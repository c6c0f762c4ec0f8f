"""DFlash drafters: config.json, the module, its context cache, loading.

The model as a drafter is in the engine; other kinds of heads are not known here.
"""

from mlx_speculation.models.dflash.cache import DFlashContext
from mlx_speculation.models.dflash.config import is_dflash
from mlx_speculation.models.dflash.head import DFlash, DFlashHead
from mlx_speculation.models.dflash.load import load_dflash

__all__ = [
    "DFlash",
    "DFlashContext",
    "DFlashHead",
    "is_dflash",
    "load_dflash",
]
