"""Families other than Qwen's whose positions have three axes."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.models.vision_families.parts import Sizes, TinyFamily, merged, patches


def _images_of_one(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Return inputs with all patches in one batch row, [1, patches, 3, 4, 4]."""
    inputs = patches(48)(sizes, key)
    return {**inputs, "pixel_values": inputs["pixel_values"].reshape(1, -1, 3, 4, 4)}


def _narrow(vlm: Any) -> None:
    """Replace the projector's last layer, which has 1,024 outputs in every config."""
    vlm.visual.projector.linear_2 = nn.Linear(128, 64)


FAMILIES: dict[str, TinyFamily] = {
    "glm4v": TinyFamily(patches(96), merged),
    "glm4v_moe": TinyFamily(patches(96), merged),
    "glm_ocr": TinyFamily(patches(96), merged),
    "paddleocr_vl": TinyFamily(_images_of_one, merged, adapt=_narrow),
    "ernie4_5_moe_vl": TinyFamily(patches(48), merged),
    "cohere_compass": TinyFamily(patches(96), merged),
}
# Built to prove the reason for which each is refused.
REFUSED = {"hunyuan_vl": TinyFamily()}
