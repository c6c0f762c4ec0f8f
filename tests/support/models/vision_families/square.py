"""Families whose images have one size, each of a number of slots that follows."""

import mlx.core as mx

from support.models.vision_families.parts import (
    IMAGE,
    IMAGE_IDS,
    LLAMA,
    SIGLIP,
    TEXT,
    TOWER,
    Sizes,
    TinyFamily,
    nested,
    sized,
)

_QWEN3 = {"head_dim": 16, "rope_theta": 1e4, "tie_word_embeddings": False}
_MISTRAL = {**TEXT, "model_type": "mistral", "head_dim": 16, "rope_theta": 1e4}
_PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 16}


def _tiled(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 2, 3, 16, 16]: each as a whole, and as one tile of all of it."""
    pixels = mx.random.normal((len(sizes), 2, 3, 16, 16), key=key)
    return {"pixel_values": pixels, "image_sizes": mx.array([[16, 16]] * len(sizes))}


def _masked(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [1, n, 3, 16, 16], and which of their pixels are filled."""
    mask = mx.ones((1, len(sizes), 16, 16), mx.int32)
    return {**nested(sizes, key), "pixel_attention_mask": mask}


def _scan(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 32, 32, 3]."""
    return {"pixel_values": mx.random.normal((len(sizes), 32, 32, 3), key=key)}


def _larger(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 3, 32, 32]."""
    return {"pixel_values": mx.random.normal((len(sizes), 3, 32, 32), key=key)}


FAMILIES: dict[str, TinyFamily] = {
    "llava": TinyFamily(
        {
            **IMAGE_IDS,
            "text_config": LLAMA,
            "vision_config": {
                **TOWER,
                "model_type": "clip_vision_model",
                "patch_size": 8,
            },
        }
    ),
    "smolvlm": TinyFamily(
        {
            **IMAGE_IDS,
            "scale_factor": 2,
            "text_config": LLAMA,
            "vision_config": SIGLIP,
        },
        nested,
    ),
    "idefics3": TinyFamily(
        {
            **IMAGE_IDS,
            "scale_factor": 2,
            "text_config": LLAMA,
            "vision_config": SIGLIP,
        },
        nested,
    ),
    "aya_vision": TinyFamily(
        {
            **IMAGE_IDS,
            "alignment_intermediate_size": 64,
            "text_config": {
                **TEXT,
                "model_type": "cohere2",
                "head_dim": 16,
                "sliding_window": 8,
                "sliding_window_pattern": 2,
            },
            "vision_config": SIGLIP,
        }
    ),
    "internvl_chat": TinyFamily(
        {
            **IMAGE_IDS,
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "model_type": "intern_vit_6b"},
        }
    ),
    "pixtral": TinyFamily(
        {**IMAGE_IDS, "text_config": _MISTRAL, "vision_config": _PIXTRAL},
        sized,
        lambda size: 16,
    ),
    "mistral3": TinyFamily(
        {
            **IMAGE_IDS,
            "spatial_merge_size": 2,
            "text_config": _MISTRAL,
            "vision_config": _PIXTRAL,
        },
        sized,
    ),
    "llava_onevision": TinyFamily(
        {
            **IMAGE_IDS,
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**SIGLIP, "patch_size": 8},
        },
        _tiled,
        lambda size: 4 + 4 + 2,
    ),
    "idefics2": TinyFamily(
        {
            **IMAGE_IDS,
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**TOWER, "model_type": "idefics2"},
            "perceiver_config": {
                "model_type": "idefics2Perceiver",
                "num_key_value_heads": 2,
                "resampler_depth": 1,
                "resampler_head_dim": 16,
                "resampler_n_heads": 4,
                "resampler_n_latents": 4,
            },
        },
        _masked,
    ),
    "internvl": TinyFamily(
        {
            "image_token_id": IMAGE,
            "text_config": {**TEXT, "model_type": "qwen3", **_QWEN3},
            "vision_config": {**TOWER, "model_type": "internvl_vision"},
        },
    ),
    "llmjpvl": TinyFamily(
        {
            "image_token_index": IMAGE,
            "text_config": LLAMA,
            "vision_config": SIGLIP,
        },
    ),
    "got": TinyFamily(
        {
            **TEXT,
            "im_patch_token": IMAGE,
            "vision_config": {
                "img_size": 32,
                "patch_size": 4,
                "embed_dim": 32,
                "depth": 2,
                "num_heads": 2,
                "mlp_ratio": 2.0,
                "out_chans": 16,
                "out_dim": 32,
                "window_size": 4,
                "global_attn_indexes": (1,),
            },
        },
        _scan,
    ),
    "step3p7": TinyFamily(
        {
            "image_token_id": IMAGE,
            "text_config": {
                **TEXT,
                "model_type": "step3p5",
                "num_attention_groups": 2,
                "head_dim": 16,
                "moe_intermediate_size": 32,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "share_expert_dim": 32,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "moe_layers_enum": [1, 2, 3],
            },
            "vision_config": {
                "width": 32,
                "layers": 2,
                "heads": 2,
                "image_size": 32,
                "mlp_ratio": 2.0,
                "patch_size": 4,
            },
        },
        _larger,
    ),
    "granite4_vision": TinyFamily(
        {
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
            "deepstack_layer_map": [[-1, 0], [0, 1]],
            "spatial_target_layers": [2, 3],
            "downsample_rate": "2/4",
            "text_config": {**TEXT, "model_type": "granitemoehybrid"},
            "vision_config": {**SIGLIP, "hidden_size": 64, "num_attention_heads": 4},
        },
        _tiled,
        lambda size: 4 + 4 + 2,
    ),
    "llama4": TinyFamily(
        {
            "image_token_id": IMAGE,
            "text_config": {
                **TEXT,
                "model_type": "llama4_text",
                "head_dim": 16,
                "intermediate_size_mlp": 128,
                "num_local_experts": 4,
                "attention_chunk_size": 8,
                "interleave_moe_layer_step": 2,
            },
            "vision_config": {
                **TOWER,
                "model_type": "llama4_vision_model",
                "intermediate_size": 128,
                "initializer_range": 0.02,
                "norm_eps": 1e-5,
                "num_channels": 3,
                "pixel_shuffle_ratio": 0.5,
                "projector_dropout": 0.0,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "rope_theta": 1e4,
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "default",
                "vision_output_dim": 64,
            },
        },
    ),
    "plamo2vl": TinyFamily(
        {
            "text_config": {
                **TEXT,
                "model_type": "plamo2",
                "hidden_size_per_head": 16,
                "mamba_d_state": 8,
                "mamba_num_heads": 4,
                "attention_window_size": 64,
            },
            "vision_config": {
                **SIGLIP,
                "image_token_id": IMAGE,
                "image_feature_size": 32,
                "image_proj_hidden_size": 64,
            },
        },
        slots=lambda size: 16,
    ),
}
