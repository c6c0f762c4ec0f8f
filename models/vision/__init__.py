"""Targets that read images: models of mlx-vlm, decoded like text models.

    load             makes a `VisionTarget` and its tokenizer from a model's folder
    families         the supported families of mlx-vlm, and why others are refused
    native_caches    mlx-lm's caches in place of mlx-vlm's, class by class
    recurrent_slots  mlx-vlm's interface of recurrent caches, over mlx-lm's
    vision_target    mlx-vlm's language model, with the interface of an mlx-lm model
    image_prompt     the token ids of a prompt, and the tensors of its images
    engine_ids       the token ids as the engine reads them
    image_forward    the forwards of one request: its embeddings, and its positions
    open_image       reads pictures from bytes, files and data URLs, within limits

Only `load` imports mlx-vlm, when it is called.
"""

from mlx_speculation.models.vision.image_forward import ImageForward
from mlx_speculation.models.vision.image_prompt import ImagePrompt
from mlx_speculation.models.vision.vision_target import VisionTarget

__all__ = ["ImageForward", "ImagePrompt", "VisionTarget"]
