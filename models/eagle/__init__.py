"""EAGLE-3 and P-EAGLE heads: config.json, modules, loading, and the layers to read.

The drafter that runs a head is in `engine.drafters`. Other heads are not known here.
"""

from mlx_speculation.models.eagle.config import (
    AFTER_NORM,
    is_eagle,
    is_peagle,
    layer_readings,
)
from mlx_speculation.models.eagle.head import Eagle, EagleHead
from mlx_speculation.models.eagle.load import load_eagle_head, load_peagle_head
from mlx_speculation.models.eagle.parallel import PEagle, PEagleHead
from mlx_speculation.models.eagle.probe import probe_layers

__all__ = [
    "AFTER_NORM",
    "Eagle",
    "EagleHead",
    "PEagle",
    "PEagleHead",
    "is_eagle",
    "is_peagle",
    "layer_readings",
    "load_eagle_head",
    "load_peagle_head",
    "probe_layers",
]
