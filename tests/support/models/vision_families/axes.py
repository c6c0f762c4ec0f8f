"""Families with positions of three axes beside Qwen's."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.models.vision_families.parts import (
    END,
    IDS,
    IMAGE,
    START,
    TEXT,
    TOWER,
    VIDEO,
    Sizes,
    TinyFamily,
    merged,
    patches,
)


def _images_of_one(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Patches [1, all, 3, 4, 4]."""
    found = patches(48)(sizes, key)
    return {**found, "pixel_values": found["pixel_values"].reshape(1, -1, 3, 4, 4)}


def _narrow(vlm: Any) -> None:
    """Give the projector as many outputs as the text has: it has always 1,024."""
    vlm.visual.projector.linear_2 = nn.Linear(128, 64)


_GLM_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_SECTION = {"type": "default", "rope_type": "default", "mrope_section": [4, 2, 2]}

FAMILIES: dict[str, TinyFamily] = {
    "glm4v": TinyFamily(
        {
            **IDS,
            "text_config": {
                **TEXT,
                "model_type": "glm4v_text",
                "eos_token_id": [0],
                "rope_scaling": {**_SECTION, "mrope_section": [2, 1, 1]},
            },
            "vision_config": {**_GLM_TOWER, "model_type": "glm4v_vision"},
        },
        patches(96),
        merged,
    ),
    "glm4v_moe": TinyFamily(
        {
            **IDS,
            "text_config": {
                **TEXT,
                "model_type": "glm4v_moe_text",
                "head_dim": 16,
                "moe_intermediate_size": 32,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 1,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.0,
                "first_k_dense_replace": 1,
                "use_qk_norm": True,
                "attention_bias": True,
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e4,
                "rope_scaling": {**_SECTION, "mrope_section": [2, 1, 1]},
            },
            "vision_config": {**_GLM_TOWER, "model_type": "glm4v_moe_vision"},
        },
        patches(96),
        merged,
    ),
    "glm_ocr": TinyFamily(
        {
            **IDS,
            "image_start_token_id": START,
            "image_end_token_id": END,
            "text_config": {
                **TEXT,
                "model_type": "glm_ocr_text",
                "head_dim": 16,
                "rope_parameters": {
                    **_SECTION,
                    "partial_rotary_factor": 1.0,
                    "rope_theta": 1e4,
                },
            },
            "vision_config": {**_GLM_TOWER, "model_type": "glm_ocr_vision"},
        },
        patches(96),
        merged,
    ),
    "paddleocr_vl": TinyFamily(
        {
            **IDS,
            **TEXT,
            "head_dim": 16,
            "use_bias": False,
            "rope_scaling": _SECTION,
            "vision_config": {**TOWER, "model_type": "paddleocr_vl"},
        },
        _images_of_one,
        merged,
        adapt=_narrow,
    ),
    "ernie4_5_moe_vl": TinyFamily(
        {
            **TEXT,
            "im_patch_id": IMAGE,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_start_token_id": START,
            "image_end_token_id": END,
            "pixel_hidden_size": 32,
            "moe_num_experts": [4, 4],
            "moe_intermediate_size": [32, 32],
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "mrope_section": [3, 3, 2],
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "num_heads": 2,
                "patch_size": 4,
            },
        },
        patches(48),
        merged,
    ),
    "cohere_compass": TinyFamily(
        {
            **IDS,
            "text_config": {
                **TEXT,
                "model_type": "cohere_compass_text",
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {
                    "sliding_attention": {
                        "rope_theta": 1e4,
                        "mrope_section": [4, 2, 2],
                    },
                    "full_attention": {"rope_theta": 1e4, "mrope_section": [4, 2, 2]},
                },
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        patches(96),
        merged,
    ),
}
# Built to show that the reason holds, for which each is refused.
REFUSED = {
    "hunyuan_vl": TinyFamily(
        {
            "image_token_id": IMAGE,
            "text_config": {
                **TEXT,
                "model_type": "hunyuan_vl",
                "head_dim": 16,
                "attention_head_dim": 16,
                "rope_scaling": {
                    "type": "xdrope",
                    "alpha": 1000.0,
                    "xdrope_section": [2, 2, 2, 2],
                },
            },
            "vision_config": {**TOWER, "out_hidden_size": 64, "max_image_size": 64},
        },
    ),
}
