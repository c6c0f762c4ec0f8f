"""DFlash drafters: config.json, the module, loading.

Later block drafters (`models.dflash2`, `models.dspark`) use parts of this package.
"""

from mlx_speculation.models.dflash.attention import (
    DFlashAttention,
    attend_block,
    by_head,
)
from mlx_speculation.models.dflash.config import (
    Anchor,
    DFlashSettings,
    block_settings,
    is_dflash,
    own_keys,
)
from mlx_speculation.models.dflash.head import DFlash, DFlashHead, DFlashLayer
from mlx_speculation.models.dflash.load import build, load_dflash, read_blocks

__all__ = [
    "Anchor",
    "DFlash",
    "DFlashAttention",
    "DFlashHead",
    "DFlashLayer",
    "DFlashSettings",
    "attend_block",
    "block_settings",
    "build",
    "by_head",
    "is_dflash",
    "load_dflash",
    "own_keys",
    "read_blocks",
]
