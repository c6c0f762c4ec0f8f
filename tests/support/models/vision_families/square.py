"""Families whose images all have one size."""

import mlx.core as mx

from support.models.vision_families.parts import Sizes, TinyFamily, nested, sized


def _tiled(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 2, 3, 16, 16]: each image whole, and as a single tile."""
    pixels = mx.random.normal((len(sizes), 2, 3, 16, 16), key=key)
    return {"pixel_values": pixels, "image_sizes": mx.array([[16, 16]] * len(sizes))}


def _masked(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [1, n, 3, 16, 16], and a mask of their filled pixels."""
    mask = mx.ones((1, len(sizes), 16, 16), mx.int32)
    return {**nested(sizes, key), "pixel_attention_mask": mask}


def _scan(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 32, 32, 3]."""
    return {"pixel_values": mx.random.normal((len(sizes), 32, 32, 3), key=key)}


def _larger(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 3, 32, 32]."""
    return {"pixel_values": mx.random.normal((len(sizes), 3, 32, 32), key=key)}


FAMILIES: dict[str, TinyFamily] = {
    "llava": TinyFamily(),
    "smolvlm": TinyFamily(nested),
    "idefics3": TinyFamily(nested),
    "aya_vision": TinyFamily(),
    "internvl_chat": TinyFamily(),
    "pixtral": TinyFamily(sized, lambda size: 16),
    "mistral3": TinyFamily(sized),
    "llava_onevision": TinyFamily(_tiled, lambda size: 4 + 4 + 2),
    "idefics2": TinyFamily(_masked),
    "internvl": TinyFamily(),
    "llmjpvl": TinyFamily(),
    "got": TinyFamily(_scan),
    "step3p7": TinyFamily(_larger),
    "granite4_vision": TinyFamily(_tiled, lambda size: 4 + 4 + 2),
    "llama4": TinyFamily(),
    "plamo2vl": TinyFamily(slots=lambda size: 16),
}
