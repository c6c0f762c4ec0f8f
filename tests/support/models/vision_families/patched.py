"""Families that cut images of any size into patches, with ordinary positions."""

import mlx.core as mx

from support.models.vision_families.parts import (
    IDS,
    IMAGE,
    IMAGE_IDS,
    LATENT,
    TEXT,
    TOWER,
    VIDEO,
    VOCAB,
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
        found = patches(48, grid, time=time)(sizes, key)
        return {**found, "pixel_values": found["pixel_values"].reshape(-1, 3, 4, 4)}

    return made


_MOON = {
    "model_type": "moonvit",
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 64,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
}
_DEEPSEEK = {
    **TEXT,
    **LATENT,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

_SINKS = {
    "head_dim": 16,
    "v_head_dim": 16,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "n_group": 1,
    "topk_group": 1,
}


def _shaped(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Patches [1, all, 48], and each image's rows and columns."""
    found = patches(48, "spatial_shapes", time=False)(sizes, key)
    return {**found, "pixel_values": found["pixel_values"][None]}


FAMILIES: dict[str, TinyFamily] = {
    "lfm2_vl": TinyFamily(
        {
            **IMAGE_IDS,
            "projector_hidden_size": 32,
            "downsample_factor": 2,
            "text_config": {
                **TEXT,
                "model_type": "lfm2",
                "block_dim": 64,
                "block_ff_dim": 128,
                "conv_dim": 64,
                "conv_dim_out": 64,
                "num_heads": 4,
                "layer_types": ["conv", "full_attention"] * 2,
            },
            "vision_config": {**TOWER, "model_type": "lfm2_vl", "num_patches": 16},
        },
        padded,
        merged,
    ),
    "dots_ocr": TinyFamily(
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "text_config": {**TEXT, "model_type": "dots_ocr"},
            "vision_config": {
                **TOWER,
                "model_type": "dots_vit",
                "embed_dim": 32,
                "hidden_size": 64,
            },
        },
        patches(48),
        merged,
    ),
    "mage_vl": TinyFamily(
        {
            **IDS,
            "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 16},
            "vision_config": {
                **TOWER,
                "model_type": "mage_vl_vision",
                "num_attention_heads": 1,
                "out_hidden_size": 64,
                "text_hidden_size": 64,
            },
        },
        patches(48),
        merged,
    ),
    "kimi_vl": TinyFamily(
        {
            "media_placeholder_token_id": IMAGE,
            "text_config": _DEEPSEEK,
            "vision_config": _MOON,
        },
        _squares("image_grid_hws"),
        merged,
    ),
    "kimi_k25": TinyFamily(
        {
            "media_placeholder_token_id": IMAGE,
            "text_config": _DEEPSEEK,
            "vision_config": _MOON,
        },
        _squares("image_grid_hws"),
        merged,
    ),
    "youtu_vl": TinyFamily(
        {
            **IDS,
            **TEXT,
            **LATENT,
            "num_key_value_heads": 4,
            "vision_config": {
                **TOWER,
                "out_hidden_size": 64,
                "num_patches": 64,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        _shaped,
        merged,
    ),
    "muse_glimmer": TinyFamily(
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "out_hidden_size": 128,
            "projector_hidden_size": 64,
            "text_config": {
                **TEXT,
                "model_type": "muse_glimmer_text",
                "head_dim": 16,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                **TOWER,
                "patch_temporal": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
        },
        patches(96),
        merged,
    ),
    "mimo_v2": TinyFamily(
        {
            **IDS,
            "audio_token_id": VOCAB - 1,
            "text_config": {
                **TEXT,
                **_SINKS,
                "model_type": "mimo_v2",
                "moe_intermediate_size": 32,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window_size": 8,
                "hybrid_layer_pattern": [0, 1, 0, 1],
                "moe_layer_freq": [0, 1, 1, 1],
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "num_heads": 2,
                "num_key_value_heads": 1,
                "num_query_groups": 2,
                "qk_channels": 16,
                "patch_size": 4,
                "spatial_patch_size": 4,
                "fullatt_block_indexes": [0],
            },
            "audio_config": {
                "out_hidden_size": 64,
                "audio_channels": 2,
                "input_local_attn_heads": 2,
                "input_local_dim": 32,
                "input_local_head_dim": 16,
                "input_local_intermediate_size": 64,
                "input_local_layers": 1,
                "speech_vocab_size": 8,
                "speech_zeroemb_idx": 4,
            },
        },
        patches(96),
        merged,
    ),
    "locateanything": TinyFamily(
        {
            "image_token_index": IMAGE,
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                **TOWER,
                "init_pos_emb_height": 8,
                "init_pos_emb_width": 8,
            },
        },
        _squares("image_grid_hws"),
        merged,
    ),
    "kimi_k3": TinyFamily(
        {
            "media_placeholder_token_id": IMAGE,
            "text_config": {
                **TEXT,
                **LATENT,
                "model_type": "kimi_linear",
                "num_key_value_heads": 4,
                "linear_attn_config": {
                    "kda_layers": [1, 3],
                    "num_heads": 2,
                    "head_dim": 16,
                    "short_conv_kernel_size": 4,
                },
                "num_experts": 4,
                "num_experts_per_token": 2,
                "num_shared_experts": 1,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
            },
            "vision_config": {
                "patch_size": 4,
                "init_pos_emb_height": 8,
                "init_pos_emb_width": 8,
                "vt_num_attention_heads": 2,
                "vt_num_hidden_layers": 2,
                "vt_hidden_size": 32,
                "vt_intermediate_size": 64,
                "qkv_hidden_size": 32,
                "mm_hidden_size": 32,
                "text_hidden_size": 64,
            },
        },
        _squares("grid_thws", time=True),
        merged,
    ),
}
