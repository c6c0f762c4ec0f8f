"""EAGLE-3 and P-EAGLE heads: config.json, modules, loading, and the layers to read.

`engine.drafters` has the drafter that runs a head. Other heads are not known here.
"""

from mlx_speculation.models.eagle.config import AFTER_NORM, is_eagle, is_peagle
from mlx_speculation.models.eagle.head import Eagle, EagleHead
from mlx_speculation.models.eagle.load import load_eagle_head
from mlx_speculation.models.eagle.parallel import PEagle, PEagleHead

__all__ = [
    "AFTER_NORM",
    "Eagle",
    "EagleHead",
    "PEagle",
    "PEagleHead",
    "is_eagle",
    "is_peagle",
    "load_eagle_head",
]
