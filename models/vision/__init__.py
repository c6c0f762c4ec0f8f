"""Targets that read images: models of mlx-vlm, decoded as text models are.

    load             a folder of mlx-vlm in, a `VisionTarget` and its tokenizer out
    families         which of mlx-vlm's families are decoded, and why others are not
    native_caches    mlx-lm's caches in place of mlx-vlm's, class by class
    recurrent_slots  mlx-vlm's interface of recurrent caches, over mlx-lm's
    vision_target    mlx-vlm's language model, with the face of an mlx-lm model
    image_prompt     token ids and what stands for images among them
    image_forward    the forwards of one request: its embeddings, and its positions
    open_image       bytes, files and data URLs in, pictures out, within limits

mlx-vlm is imported by `load` alone, when it is called. How tokens are drafted, chosen
or accepted is not known here, and neither is where a request came from.
"""

from mlx_speculation.models.vision.image_forward import ImageForward
from mlx_speculation.models.vision.image_prompt import ImagePrompt
from mlx_speculation.models.vision.vision_target import VisionTarget

__all__ = ["ImageForward", "ImagePrompt", "VisionTarget"]
