"""Families whose processors say where in a prompt the slots of images are."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.models.vision_families.parts import (
    END,
    IMAGE,
    LATENT,
    LINEAR,
    START,
    TEXT,
    TOWER,
    VIDEO,
    VOCAB,
    Sizes,
    TinyFamily,
)


def _pooled(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Crops [n, 16, 48], and which 4 patches of each make a slot."""
    rows = mx.arange(16).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3).reshape(4, 4)
    return {
        "pixel_values": mx.random.normal((len(sizes), 16, 48), key=key),
        "image_token_pooling": mx.concatenate([rows] * len(sizes)),
        "image_grids": mx.array([[2, 2, 0, 0]] * len(sizes)),
        "image_num_crops": mx.array([1] * len(sizes)),
    }


def _crops(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Crops [n, 16, 48], all of whose patches are filled."""
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
    """Say which token stands for a patch: config.json has always the same."""
    vlm.config.image_patch_token_id = IMAGE


def _masked(ids: mx.array) -> dict[str, mx.array]:
    """Which ids are slots."""
    return {"images_seq_mask": ids == IMAGE}


def _whole(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """No crops, and images [n, 3, 16, 16]."""
    pixels = mx.random.normal((len(sizes), 3, 16, 16), key=key)
    found: Any = {"pixel_values": [mx.zeros((1, 3, 16, 16)), pixels]}
    return {**found, "images_spatial_crop": mx.array([[1, 1]] * len(sizes))}


def _sliced(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [3, 32, 32] of one prompt, in lists, and how many patches each has."""
    pixels = mx.random.normal((len(sizes), 3, 32, 32), key=key)
    found: Any = {"pixel_values": [list(pixels)]}
    return {**found, "tgt_sizes": mx.array([[[8, 8]] * len(sizes)])}


def _bounds(ids: mx.array) -> dict[str, mx.array]:
    """Where the slots of each image are, four of each."""
    starts: Any = _indexed(ids)["image_input_idx"][:, 0].tolist()
    found: Any = [mx.array([[start, start + 4] for start in starts])]
    return {"image_bound": found}


class _Sam(nn.Module):
    """Cuts an image into four [n, 2, 2, 32]: SAM has one size."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conv = nn.Conv2d(3, 32, 8, 8)

    def __call__(self, pixels: mx.array) -> mx.array:
        found: mx.array = self.conv(pixels)
        return found


def _rows(pixels: mx.array, patch_embeds: mx.array) -> mx.array:
    """What SAM has made, as rows."""
    return patch_embeds.flatten(1, 2)


def _rows_of_clip(pixels: mx.array, patch_embeds: mx.array) -> mx.array:
    """The same, behind a row for the whole image."""
    rows = _rows(pixels, patch_embeds)
    return mx.concatenate([rows[:, :1], rows], axis=1)


def _small_ocr(vlm: Any) -> None:
    vlm.sam_model, vlm.vision_model = _Sam(), _rows_of_clip


def _small_ocr_2(vlm: Any) -> None:
    vlm.sam_model, vlm.vision_model = _Sam(), _rows


_DEEPSEEK: dict[str, Any] = {
    **TEXT,
    **LATENT,
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

_LLAMA_LIKE = {**_DEEPSEEK, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0}
_MINICPM: dict[str, Any] = {
    "insert_layer_id": 0,
    "vision_config": {
        **TOWER,
        "model_type": "minicpmv4_6_vision",
        "image_size": 32,
    },
}
_CANVAS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_id": START,
    "image_end_id": END,
    "slice_start_id": VOCAB - 3,
    "slice_end_id": VOCAB - 2,
    "newline_id": VOCAB - 1,
}

FAMILIES: dict[str, TinyFamily] = {
    "molmo2": TinyFamily(
        {
            "image_patch_id": IMAGE,
            "image_end_token_id": END,
            "text_config": {
                **TEXT,
                "vocab_size": 256,
                "additional_vocab_size": VOCAB - 256,
                "model_type": "molmo2",
                "head_dim": 16,
            },
            "vision_config": {
                "vit_config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "image_patch_size": 4,
                    "image_num_pos": 16,
                    "image_default_input_size": [16, 16],
                },
                "adapter_config": {
                    "hidden_size": 32,
                    "intermediate_size": 64,
                    "text_hidden_size": 64,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "vit_layers": [-1, -2],
                },
            },
        },
        _pooled,
        frame=([START], [END, END]),
    ),
    "molmo": TinyFamily(
        {
            "text_config": {
                "model_type": "molmo",
                "d_model": 64,
                "n_heads": 4,
                "n_kv_heads": 2,
                "n_layers": 4,
                "mlp_hidden_size": 128,
                "vocab_size": 256,
                "embedding_size": 256,
                "additional_vocab_size": VOCAB - 256,
            },
            "vision_config": {
                "model_type": "molmo",
                "d_model": 64,
                "hidden_size": 128,
                "image_default_input_size": [16, 16],
                "image_patch_size": 4,
                "image_pos_patch_size": 4,
                "image_emb_dim": 32,
                "image_num_heads": 2,
                "image_num_key_value_heads": 2,
                "image_num_layers": 2,
                "image_head_dim": 16,
                "image_mlp_dim": 64,
                "image_num_pos": 17,
                "vit_layers": [-1, -2],
            },
        },
        _crops,
        located=_indexed,
    ),
    "jina_vlm": TinyFamily(
        {
            "text_config": {
                **TEXT,
                "model_type": "jina_vlm",
                "head_dim": 16,
                "additional_vocab_size": 2,
            },
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "image_size": 16,
                "intermediate_size": 64,
                "vit_layers": [-1, -2],
                "output_size": 64,
                "connector_hidden_size": 64,
            },
        },
        _crops_of_each,
        located=_indexed_of_each,
        adapt=_name_patches,
    ),
    "deepseekocr": TinyFamily(
        {
            "image_token_index": IMAGE,
            "text_config": _LLAMA_LIKE,
            "vision_config": {"model_type": "vision", "layers": 1, "hidden_size": 32},
            "projector_config": {"input_dim": 64, "n_embed": 64},
        },
        _whole,
        lambda size: 2 * 3 + 1,
        located=_masked,
        adapt=_small_ocr,
    ),
    "deepseekocr_2": TinyFamily(
        {
            "image_token_index": IMAGE,
            "text_config": _LLAMA_LIKE,
            "vision_config": {"model_type": "vision"},
            "projector_config": {"input_dim": 32, "n_embed": 64},
        },
        _whole,
        lambda size: 4 + 1,
        located=_masked,
        adapt=_small_ocr_2,
    ),
    "minicpmv4_6": TinyFamily(
        {
            **_MINICPM,
            "text_config": {**TEXT, **LINEAR, "model_type": "qwen3_5_text"},
        },
        _sliced,
        located=_bounds,
    ),
    "minicpmv4_7": TinyFamily(
        {
            **_MINICPM,
            **_CANVAS,
            "text_config": {**TEXT, **LINEAR, "model_type": "qwen3_5_text"},
        },
        _sliced,
    ),
}
