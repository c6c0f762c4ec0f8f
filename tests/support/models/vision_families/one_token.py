"""Families whose prompts mark an image otherwise than by four `IMAGE` ids.

Vision towers that no config makes small are replaced by tiny ones.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.models.vision_families.parts import (
    Sizes,
    TinyFamily,
    nested,
    padded,
    square,
)


def _one(size: tuple[int, int]) -> int:
    return 1


class _Quarters(nn.Module):
    """Encodes each quarter of an image as one row, [n, 4, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conv = nn.Conv2d(3, width, 8, 8)

    def __call__(self, pixels: mx.array) -> mx.array:
        output: mx.array = self.conv(pixels.transpose(0, 2, 3, 1))
        return output.reshape(len(pixels), 4, -1)


class _Phi(_Quarters):
    """Writes the rows of each image into the embeddings, from its first slot on."""

    def __call__(self, *args: Any) -> mx.array:
        pixels, embeds, _, places = args
        embedded: mx.array = embeds
        for number, rows in enumerate(super().__call__(pixels)):
            row, start = places[4 * number]
            embedded[row, start : start + 4] = rows
        return embedded


def _small_phi(vlm: Any) -> None:
    vlm.model.vision_embed_tokens = _Phi(64)


class _Fast(nn.Module):
    """Has the interface of FastViTHD: a stem, whose dtype is read, and a grid."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vision_model = nn.Module()
        self.vision_model.patch_embed = nn.Module()
        stem = nn.Module()
        stem.reparam_conv = nn.Conv2d(3, 32, 8, 8)
        self.vision_model.patch_embed.blocks = [stem]

    def __call__(self, pixels: mx.array) -> tuple[None, mx.array, None]:
        (stem,) = self.vision_model.patch_embed.blocks
        return None, stem.reparam_conv(pixels), None


def _small_fast(vlm: Any) -> None:
    vlm.vision_tower = _Fast()


def _large(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 3, 27, 27]."""
    return {"pixel_values": mx.random.normal((len(sizes), 3, 27, 27), key=key)}


def _tiles(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 1, 3, 16, 16], of one tile each."""
    return {"pixel_values": nested(sizes, key)["pixel_values"].swapaxes(0, 1)}


FAMILIES: dict[str, TinyFamily] = {
    "llava_next": TinyFamily(_tiles, lambda size: 3),
    "granite_vision": TinyFamily(_tiles, lambda size: 3),
    "multi_modality": TinyFamily(square, lambda size: 16),
    "llava_bunny": TinyFamily(_large, _one, image=-200),
    "fastvlm": TinyFamily(square, _one, image=-200, adapt=_small_fast),
    "phi4_siglip": TinyFamily(padded, _one, image=-200),
    "phi3_v": TinyFamily(square, image=-1, adapt=_small_phi),
}
