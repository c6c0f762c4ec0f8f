"""Families that cut images of any size into patches."""

import mlx.core as mx

from support.models.vision_families.parts import (
    Pixels,
    Sizes,
    TinyFamily,
    merged,
    padded,
    patches,
)


def _squares(grid: str, *, time: bool = False) -> Pixels:
    """Patches [all, 3, 4, 4], and each image's rows and columns."""

    def made(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
        inputs = patches(48, grid, time=time)(sizes, key)
        return {**inputs, "pixel_values": inputs["pixel_values"].reshape(-1, 3, 4, 4)}

    return made


def _shaped(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Patches [1, all, 48], and each image's rows and columns."""
    inputs = patches(48, "spatial_shapes", time=False)(sizes, key)
    return {**inputs, "pixel_values": inputs["pixel_values"][None]}


FAMILIES: dict[str, TinyFamily] = {
    "lfm2_vl": TinyFamily(padded, merged),
    "dots_ocr": TinyFamily(patches(48), merged),
    "mage_vl": TinyFamily(patches(48), merged),
    "kimi_vl": TinyFamily(_squares("image_grid_hws"), merged),
    "kimi_k25": TinyFamily(_squares("image_grid_hws"), merged),
    "youtu_vl": TinyFamily(_shaped, merged),
    "muse_glimmer": TinyFamily(patches(96), merged),
    "mimo_v2": TinyFamily(patches(96), merged),
    "locateanything": TinyFamily(_squares("image_grid_hws"), merged),
    "kimi_k3": TinyFamily(_squares("grid_thws", time=True), merged),
}
