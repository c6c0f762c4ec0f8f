"""Targets that read images: models of mlx-vlm, decoded like text models.

The module `load` makes a `VisionTarget` from a model's folder. mlx-vlm is imported only
there, inside functions. A request passes an `ImagePrompt`, and an `ImageForward` feeds
it to the target.
"""

from mlx_speculation.models.vision.image_forward import ImageForward
from mlx_speculation.models.vision.image_prompt import ImagePrompt
from mlx_speculation.models.vision.vision_target import VisionTarget

__all__ = ["ImageForward", "ImagePrompt", "VisionTarget"]
