"""Qwen's families: positions with three axes, images of any size in patches."""

from support.models.vision_families.parts import TinyFamily, merged, patches

FAMILIES: dict[str, TinyFamily] = {
    "qwen2_vl": TinyFamily(patches(96), merged),
    "qwen2_5_vl": TinyFamily(patches(96), merged),
    "qwen3_vl": TinyFamily(patches(96), merged),
    "qwen3_vl_moe": TinyFamily(patches(96), merged),
    "qwen3_5": TinyFamily(patches(96), merged),
    "qwen3_5_moe": TinyFamily(patches(96), merged),
}
