"""Qwen's families: positions of three axes, patches of images of any size."""

from typing import Any

from support.models.vision_families.parts import (
    END,
    EXPERTS,
    IMAGE,
    LINEAR,
    START,
    TEXT,
    VIDEO,
    TinyFamily,
    merged,
    patches,
)

_QWEN: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
}
FAMILIES: dict[str, TinyFamily] = {
    "qwen2_vl": TinyFamily(
        {
            **_QWEN_IDS,
            **TEXT,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "vision_config": {
                **_QWEN,
                "embed_dim": 32,
                "hidden_size": 64,
                "mlp_ratio": 2,
            },
        },
        patches(96),
        merged,
    ),
    "qwen2_5_vl": TinyFamily(
        {
            **_QWEN_IDS,
            "text_config": {
                **TEXT,
                "model_type": "qwen2_5_vl",
                "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            },
            "vision_config": {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        patches(96),
        merged,
    ),
    "qwen3_vl": TinyFamily(
        {
            **_QWEN_IDS,
            "text_config": {
                **TEXT,
                "model_type": "qwen3_vl_text",
                "head_dim": 16,
                "rope_theta": 1e4,
                "tie_word_embeddings": True,
                "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                **_QWEN,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        patches(96),
        merged,
    ),
    "qwen3_vl_moe": TinyFamily(
        {
            **_QWEN_IDS,
            "text_config": {
                **TEXT,
                **EXPERTS,
                "model_type": "qwen3_vl_moe_text",
                "head_dim": 16,
                "rope_theta": 1e4,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "rope_scaling": {"type": "default", "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                **_QWEN,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        patches(96),
        merged,
    ),
    "qwen3_5": TinyFamily(
        {
            **_QWEN_IDS,
            "text_config": {
                **TEXT,
                **LINEAR,
                "model_type": "qwen3_5_text",
            },
            "vision_config": {**_QWEN, "num_position_embeddings": 64},
        },
        patches(96),
        merged,
    ),
    "qwen3_5_moe": TinyFamily(
        {
            **_QWEN_IDS,
            "text_config": {
                **TEXT,
                **EXPERTS,
                **LINEAR,
                "model_type": "qwen3_5_moe_text",
                "shared_expert_intermediate_size": 32,
            },
            "vision_config": {**_QWEN, "num_position_embeddings": 64},
        },
        patches(96),
        merged,
    ),
}
