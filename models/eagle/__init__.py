"""EAGLE-3 heads: config.json, the module, loading, and which layers they read.

The head as a drafter is in the engine; other kinds of heads are not known here.
"""

from mlx_speculation.models.eagle.config import LayerIds, is_eagle, layer_readings
from mlx_speculation.models.eagle.head import Eagle, EagleHead
from mlx_speculation.models.eagle.load import load_eagle_head
from mlx_speculation.models.eagle.probe import probe_layers

__all__ = [
    "Eagle",
    "EagleHead",
    "LayerIds",
    "is_eagle",
    "layer_readings",
    "load_eagle_head",
    "probe_layers",
]
