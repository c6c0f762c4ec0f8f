"""Gemma's families: sliding windows, and separate inputs for each layer."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.models.vision_families.parts import Sizes, TinyFamily, square


def _bright(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images whose pixels lie between 0 and 1."""
    return {"pixel_values": mx.sigmoid(square(sizes, key)["pixel_values"])}


def _placed(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Patches [n, most, 48] and their columns and rows, -1 for padding."""
    most = max(down * across for down, across in sizes)
    places = [
        [[column, row] for row in range(down) for column in range(across)]
        + [[-1, -1]] * (most - down * across)
        for down, across in sizes
    ]
    return {
        "pixel_values": mx.random.normal((len(sizes), most, 48), key=key),
        "image_position_ids": mx.array(places),
    }


class _Tower(nn.Module):
    """Cuts an image into 4 patches, in place of the family's tower of 300M weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conv = nn.Conv2d(3, 32, 8, 8)

    def __call__(self, pixels: mx.array, output_hidden_states: bool) -> mx.array:
        output: mx.array = self.conv(pixels.transpose(0, 2, 3, 1))
        return output


def _small_tower(vlm: Any) -> None:
    vlm.vision_tower = _Tower()


FAMILIES: dict[str, TinyFamily] = {
    "gemma3": TinyFamily(),
    "gemma4": TinyFamily(_bright),
    "gemma4_unified": TinyFamily(_placed, lambda size: size[0] * size[1]),
}
# Built to prove the reason for which each is refused.
REFUSED = {"gemma3n": TinyFamily(square, adapt=_small_tower)}
