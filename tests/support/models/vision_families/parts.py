"""Description of a tiny family, and pixels as processors make them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

START, END, IMAGE, VIDEO = range(256, 260)
VOCAB = 264
Size = tuple[int, int]
Sizes = Sequence[Size]
Pixels = Callable[[Sizes, mx.array], dict[str, mx.array]]


def square(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 3, 16, 16]."""
    return {"pixel_values": mx.random.normal((len(sizes), 3, 16, 16), key=key)}


def nested(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [1, n, 3, 16, 16]: those of one prompt."""
    return {"pixel_values": square(sizes, key)["pixel_values"][None]}


def sized(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 3, 16, 16], and their sizes in pixels [n, 2]."""
    return {**square(sizes, key), "image_sizes": mx.array([[16, 16]] * len(sizes))}


def patches(width: int, grid: str = "image_grid_thw", time: bool = True) -> Pixels:
    """Patches [all, width] of images of any size, and the grid of each image.

    A grid is [rows, columns] of patches, or [1, rows, columns] if `time`.
    """

    def made(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
        count = sum(down * across for down, across in sizes)
        sides = [[1, *size] if time else [*size] for size in sizes]
        return {
            "pixel_values": mx.random.normal((count, width), key=key),
            grid: mx.array(sides),
        }

    return made


def padded(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Patches [n, most, 48], padded to the largest number of patches of an image."""
    sides = mx.array([list(size) for size in sizes])
    most = max(down * across for down, across in sizes)
    filled = mx.arange(most)[None] < (sides[:, 0] * sides[:, 1])[:, None]
    return {
        "pixel_values": mx.random.normal((len(sizes), most, 48), key=key),
        "spatial_shapes": sides,
        "pixel_attention_mask": filled.astype(mx.int32),
    }


def merged(size: Size) -> int:
    """Return the number of slots of an image if four patches make a slot."""
    return size[0] * size[1] // 4


def four(size: Size) -> int:
    return 4


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """A tiny family of mlx-vlm."""

    pixels: Pixels = square  # makes the tensors of images of these sizes
    slots: Callable[[Size], int] = four  # number of slots of an image
    frame: tuple[list[int], list[int]] = ([START], [END])  # ids around the slots
    # Returns the tensors that say where the slots are, from a prompt's ids [1, n]
    located: Callable[[mx.array], dict[str, mx.array]] | None = None
    image: int = IMAGE  # id in each slot; -200: one slot for a whole image
    adapt: Callable[[Any], None] | None = None  # shrinks parts that configs cannot
    config: dict[str, Any] = field(default_factory=dict)  # without `model_type`
