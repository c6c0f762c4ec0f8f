"""Gemma's families: sliding windows, and inputs of their own for each layer."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.models.vision_families.parts import (
    IMAGE,
    IMAGE_IDS,
    SIGLIP,
    TEXT,
    VIDEO,
    VOCAB,
    Sizes,
    TinyFamily,
    square,
)


def _bright(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images whose pixels lie between 0 and 1."""
    return {"pixel_values": mx.sigmoid(square(sizes, key)["pixel_values"])}


_GEMMA4_TEXT: dict[str, Any] = {
    **TEXT,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_double_wide_mlp": False,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}


def _placed(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Patches [n, most, 48] and their columns and rows, -1 where an image has ended."""
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
    """Cuts an image into four: the family's tower has one size, of 300M weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conv = nn.Conv2d(3, 32, 8, 8)

    def __call__(self, pixels: mx.array, output_hidden_states: bool) -> mx.array:
        found: mx.array = self.conv(pixels.transpose(0, 2, 3, 1))
        return found


def _small_tower(vlm: Any) -> None:
    vlm.vision_tower = _Tower()


FAMILIES: dict[str, TinyFamily] = {
    "gemma3": TinyFamily(
        {
            **IMAGE_IDS,
            "hidden_size": 64,
            "pad_token_id": 0,
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": 8,
                "sliding_window_pattern": 2,
                "mm_tokens_per_image": 4,
            },
            "vision_config": SIGLIP,
        }
    ),
    "gemma4": TinyFamily(
        {
            **IMAGE_IDS,
            "audio_config": None,
            "audio_token_id": VIDEO,
            "text_config": {**_GEMMA4_TEXT, "model_type": "gemma4_text"},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "global_head_dim": 16,
                "patch_size": 4,
                "position_embedding_size": 16,
                "pooling_kernel_size": 2,
                "default_output_length": 4,
            },
        },
        _bright,
    ),
    "gemma4_unified": TinyFamily(
        {
            "image_token_id": IMAGE,
            "audio_token_id": VOCAB - 1,
            "video_token_id": VIDEO,
            "audio_config": None,
            "text_config": {
                **_GEMMA4_TEXT,
                "model_type": "gemma4_unified_text",
                "use_bidirectional_attention": None,
            },
            "vision_config": {
                "patch_size": 2,
                "pooling_kernel_size": 2,
                "model_patch_size": 4,
                "mm_embed_dim": 32,
                "mm_posemb_size": 16,
                "output_proj_dims": 32,
            },
        },
        _placed,
        lambda size: size[0] * size[1],
    ),
}
# Built to show that the reason holds, for which each is refused.
REFUSED = {
    "gemma3n": TinyFamily(
        {
            **IMAGE_IDS,
            "hidden_size": 64,
            "vision_soft_tokens_per_image": 4,
            "audio_token_id": VOCAB - 1,
            "text_config": {
                **TEXT,
                "model_type": "gemma3n_text",
                "intermediate_size": [128] * 4,
                "head_dim": 16,
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 8,
                "altup_num_inputs": 2,
                "num_kv_shared_layers": 2,
                "sliding_window": 8,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                "hidden_size": 32,
                "vocab_size": 2,
                "vocab_offset": IMAGE,
            },
            "audio_config": {
                "hidden_size": 32,
                "input_feat_size": 16,
                "conf_num_attention_heads": 2,
                "conf_num_hidden_layers": 1,
                "sscp_conv_channel_size": [8, 4],
                "vocab_size": 4,
                "vocab_offset": IMAGE + 2,
            },
        },
        square,
        adapt=_small_tower,
    ),
}
