"""Model families whose processors return where a prompt has slots for images."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.models.vision_families.parts import END, IMAGE, START, Sizes, TinyFamily


def _pooled(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Return crops [n, 16, 48], and for each slot the 4 patches that it pools."""
    rows = mx.arange(16).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(4, 4)
    return {
        "pixel_values": mx.random.normal((len(sizes), 16, 48), key=key),
        "image_token_pooling": mx.concatenate([rows] * len(sizes)),
        "image_grids": mx.array([[2, 2, 0, 0]] * len(sizes)),
        "image_num_crops": mx.array([1] * len(sizes)),
    }


def _crops(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Return crops [n, 16, 48] without padded patches."""
    return {
        "pixel_values": mx.random.normal((len(sizes), 16, 48), key=key),
        "image_masks": mx.ones((len(sizes), 16)),
    }


def _crops_of_each(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Return crops [n, 1, 16, 48], one for each image."""
    return {name: value[:, None] for name, value in _crops(sizes, key).items()}


def _indexed(ids: mx.array) -> dict[str, mx.array]:
    """Return the places of the slots [images, 4], four for each image."""
    tokens: Any = ids[0].tolist()
    places = [place for place, token in enumerate(tokens) if token == IMAGE]
    return {"image_input_idx": mx.array(places).reshape(-1, 4)}


def _indexed_of_each(ids: mx.array) -> dict[str, mx.array]:
    """Return the places of the slots as [images, 1 crop, 4]."""
    return {name: value[:, None] for name, value in _indexed(ids).items()}


def _name_patches(vlm: Any) -> None:
    vlm.config.image_patch_token_id = IMAGE


def _masked(ids: mx.array) -> dict[str, mx.array]:
    return {"images_seq_mask": ids == IMAGE}


def _whole(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Return zeros for the crops, and images [n, 3, 16, 16]."""
    pixels = mx.random.normal((len(sizes), 3, 16, 16), key=key)
    inputs: Any = {"pixel_values": [mx.zeros((1, 3, 16, 16)), pixels]}
    return {**inputs, "images_spatial_crop": mx.array([[1, 1]] * len(sizes))}


def _sliced(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Return images [3, 32, 32] of one prompt, in a list, and their patch counts."""
    pixels = mx.random.normal((len(sizes), 3, 32, 32), key=key)
    inputs: Any = {"pixel_values": [list(pixels)]}
    return {**inputs, "tgt_sizes": mx.array([[[8, 8]] * len(sizes)])}


def _bounds(ids: mx.array) -> dict[str, mx.array]:
    """Return the start and end of the four slots of each image."""
    starts: Any = _indexed(ids)["image_input_idx"][:, 0].tolist()
    bounds: Any = [mx.array([[start, start + 4] for start in starts])]
    return {"image_bound": bounds}


class _Sam(nn.Module):
    """A small substitute for SAM: a convolution that returns [n, 2, 2, 32]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conv = nn.Conv2d(3, 32, 8, 8)

    def __call__(self, pixels: mx.array) -> mx.array:
        output: mx.array = self.conv(pixels)
        return output


def _rows(pixels: mx.array, patch_embeds: mx.array) -> mx.array:
    """Return SAM's output with its two axes of places flattened to rows."""
    return patch_embeds.flatten(1, 2)


def _rows_of_clip(pixels: mx.array, patch_embeds: mx.array) -> mx.array:
    """Return a row for the whole image, then the rows of SAM's output."""
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
