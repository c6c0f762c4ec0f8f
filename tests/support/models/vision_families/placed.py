"""Families whose processors return the places of the images' slots in a prompt."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.models.vision_families.parts import END, IMAGE, START, Sizes, TinyFamily


def _pooled(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Crops [n, 16, 48], and the 4 patches of each that make a slot."""
    rows = mx.arange(16).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(4, 4)
    return {
        "pixel_values": mx.random.normal((len(sizes), 16, 48), key=key),
        "image_token_pooling": mx.concatenate([rows] * len(sizes)),
        "image_grids": mx.array([[2, 2, 0, 0]] * len(sizes)),
        "image_num_crops": mx.array([1] * len(sizes)),
    }


def _crops(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Crops [n, 16, 48] without padded patches."""
    return {
        "pixel_values": mx.random.normal((len(sizes), 16, 48), key=key),
        "image_masks": mx.ones((len(sizes), 16)),
    }


def _crops_of_each(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Crops [n, 1, 16, 48]: one of each image."""
    return {name: value[:, None] for name, value in _crops(sizes, key).items()}


def _indexed(ids: mx.array) -> dict[str, mx.array]:
    """The places of slots, four of each image."""
    tokens: Any = ids[0].tolist()
    places = [place for place, token in enumerate(tokens) if token == IMAGE]
    return {"image_input_idx": mx.array(places).reshape(-1, 4)}


def _indexed_of_each(ids: mx.array) -> dict[str, mx.array]:
    """The same, in the one crop of each image."""
    return {name: value[:, None] for name, value in _indexed(ids).items()}


def _name_patches(vlm: Any) -> None:
    """Set the id that stands for a patch; every config.json has the same."""
    vlm.config.image_patch_token_id = IMAGE


def _masked(ids: mx.array) -> dict[str, mx.array]:
    """Return a mask of the ids that are slots."""
    return {"images_seq_mask": ids == IMAGE}


def _whole(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """No crops, and images [n, 3, 16, 16]."""
    pixels = mx.random.normal((len(sizes), 3, 16, 16), key=key)
    inputs: Any = {"pixel_values": [mx.zeros((1, 3, 16, 16)), pixels]}
    return {**inputs, "images_spatial_crop": mx.array([[1, 1]] * len(sizes))}


def _sliced(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [3, 32, 32] of one prompt, in lists, and the patches of each."""
    pixels = mx.random.normal((len(sizes), 3, 32, 32), key=key)
    inputs: Any = {"pixel_values": [list(pixels)]}
    return {**inputs, "tgt_sizes": mx.array([[[8, 8]] * len(sizes)])}


def _bounds(ids: mx.array) -> dict[str, mx.array]:
    """Return the bounds of each image's slots, four of each."""
    starts: Any = _indexed(ids)["image_input_idx"][:, 0].tolist()
    bounds: Any = [mx.array([[start, start + 4] for start in starts])]
    return {"image_bound": bounds}


class _Sam(nn.Module):
    """Cuts an image into four, [n, 2, 2, 32], instead of SAM, which has one size."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conv = nn.Conv2d(3, 32, 8, 8)

    def __call__(self, pixels: mx.array) -> mx.array:
        output: mx.array = self.conv(pixels)
        return output


def _rows(pixels: mx.array, patch_embeds: mx.array) -> mx.array:
    """Return SAM's output as rows."""
    return patch_embeds.flatten(1, 2)


def _rows_of_clip(pixels: mx.array, patch_embeds: mx.array) -> mx.array:
    """Return the same rows after a row for the whole image."""
    rows = _rows(pixels, patch_embeds)
    return mx.concatenate([rows[:, :1], rows], axis=1)


def _small_ocr(vlm: Any) -> None:
    vlm.sam_model, vlm.vision_model = _Sam(), _rows_of_clip


def _small_ocr_2(vlm: Any) -> None:
    vlm.sam_model, vlm.vision_model = _Sam(), _rows


FAMILIES: dict[str, TinyFamily] = {
    "molmo2": TinyFamily(_pooled, frame=([START], [END, END])),
    "molmo": TinyFamily(_crops, located=_indexed),
    "jina_vlm": TinyFamily(
        _crops_of_each, located=_indexed_of_each, adapt=_name_patches
    ),
    "deepseekocr": TinyFamily(
        _whole, lambda size: 2 * 3 + 1, located=_masked, adapt=_small_ocr
    ),
    "deepseekocr_2": TinyFamily(
        _whole, lambda size: 4 + 1, located=_masked, adapt=_small_ocr_2
    ),
    "minicpmv4_6": TinyFamily(_sliced, located=_bounds),
    "minicpmv4_7": TinyFamily(_sliced),
}
