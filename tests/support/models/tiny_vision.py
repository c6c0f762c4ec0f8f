"""Tiny models of mlx-vlm's families with random weights, and prompts with images.

    FAMILIES    the configs, by family
    tiny        a model
    prompt_with a prompt with images of given sizes, as a processor would make it

Images are random tensors of the shape that the family's processor makes. Those of Qwen
have a size of their own each; the others have one size for all.
"""

import copy
import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.models.vision import ImagePrompt, VisionTarget
from support.models.tiny_tokenizer import byte_tokenizer

WITHOUT_MLX_VLM = pytest.mark.skipif(
    find_spec("mlx_vlm") is None, reason="mlx-vlm is not installed"
)
START, END, IMAGE, VIDEO = range(256, 260)
NAMES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCAB = 264
QWEN = {
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
}
# Images of these have sizes of their own.
PATCHES = QWEN | {"lfm2_vl"}

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
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
_TOWER: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model"}
_IMAGE_IDS = {"image_token_id": IMAGE, "image_token_index": IMAGE}
_LLAMA = {**_TEXT, "model_type": "llama"}
_MISTRAL = {**_TEXT, "model_type": "mistral", "head_dim": 16, "rope_theta": 1e4}
_PIXTRAL = {**_TOWER, "model_type": "pixtral", "head_dim": 16}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "max_position_embeddings": 512,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **_QWEN_IDS,
        "text_config": {
            **_TEXT,
            "model_type": "qwen2_5_vl",
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        "vision_config": {**_QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        **_QWEN_IDS,
        "text_config": {
            **_TEXT,
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
    "qwen3_5": {
        **_QWEN_IDS,
        "text_config": {
            **_TEXT,
            **_LINEAR,
            "model_type": "qwen3_5_text",
        },
        "vision_config": {**_QWEN, "num_position_embeddings": 64},
    },
    "gemma3": {
        **_IMAGE_IDS,
        "hidden_size": 64,
        "pad_token_id": 0,
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "mm_tokens_per_image": 4,
        },
        "vision_config": _SIGLIP,
    },
    "gemma4": {
        **_IMAGE_IDS,
        "audio_config": None,
        "audio_token_id": VIDEO,
        "text_config": {
            **_TEXT,
            "model_type": "gemma4_text",
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
        },
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
    "llava": {
        **_IMAGE_IDS,
        "text_config": _LLAMA,
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "patch_size": 8},
    },
    "smolvlm": {
        **_IMAGE_IDS,
        "scale_factor": 2,
        "text_config": _LLAMA,
        "vision_config": _SIGLIP,
    },
    "idefics3": {
        **_IMAGE_IDS,
        "scale_factor": 2,
        "text_config": _LLAMA,
        "vision_config": _SIGLIP,
    },
    "qwen2_vl": {
        **_QWEN_IDS,
        **_TEXT,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {
            **_QWEN,
            "embed_dim": 32,
            "hidden_size": 64,
            "mlp_ratio": 2,
        },
    },
    "qwen3_vl_moe": {
        **_QWEN_IDS,
        "text_config": {
            **_TEXT,
            **_EXPERTS,
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
    "qwen3_5_moe": {
        **_QWEN_IDS,
        "text_config": {
            **_TEXT,
            **_EXPERTS,
            **_LINEAR,
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 32,
        },
        "vision_config": {**_QWEN, "num_position_embeddings": 64},
    },
    "aya_vision": {
        **_IMAGE_IDS,
        "alignment_intermediate_size": 64,
        "text_config": {
            **_TEXT,
            "model_type": "cohere2",
            "head_dim": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
        },
        "vision_config": _SIGLIP,
    },
    "internvl_chat": {
        **_IMAGE_IDS,
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "model_type": "intern_vit_6b"},
    },
    "lfm2_vl": {
        **_IMAGE_IDS,
        "projector_hidden_size": 32,
        "downsample_factor": 2,
        "text_config": {
            **_TEXT,
            "model_type": "lfm2",
            "block_dim": 64,
            "block_ff_dim": 128,
            "conv_dim": 64,
            "conv_dim_out": 64,
            "num_heads": 4,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        "vision_config": {**_TOWER, "model_type": "lfm2_vl", "num_patches": 16},
    },
    "pixtral": {**_IMAGE_IDS, "text_config": _MISTRAL, "vision_config": _PIXTRAL},
    "mistral3": {
        **_IMAGE_IDS,
        "spatial_merge_size": 2,
        "text_config": _MISTRAL,
        "vision_config": _PIXTRAL,
    },
}
# Vectors that a model draws at random where it is made.
_DRAWN = {"bias", "dt_bias", "A_log"}
# How many slots an image of 16 x 16 pixels takes.
_SLOTS = {"pixtral": 16}


def tiny(name: str, seed: int = 0, **text_config: Any) -> VisionTarget:
    """Return a model of a family with random weights, the same for the same seed."""
    config = copy.deepcopy({"model_type": name, **FAMILIES[name]})
    config.get("text_config", config).update(text_config)
    package: Any = importlib.import_module(f"mlx_vlm.models.{name}")
    made = package.ModelConfig.from_dict(copy.deepcopy(config))
    text = config.get("text_config", config)
    made.text_config = package.TextConfig.from_dict(text)
    made.vision_config = package.VisionConfig.from_dict(config["vision_config"])
    vlm: nn.Module = package.Model(made)
    state = mx.random.key(seed)

    def randomised(key: str, value: Any) -> Any:
        nonlocal state
        if value.ndim < 2 and key not in _DRAWN:  # a norm's, or a scale
            return value
        state, here = mx.random.split(state)
        return 0.15 * mx.random.normal(value.shape, key=here)

    vlm.apply_to_modules(
        lambda _, module: module.update(
            {
                key: randomised(key, value)
                for key, value in module.items()
                if isinstance(value, mx.array)
            }
        )
    )
    vlm.eval()
    mx.eval(vlm.parameters())
    return VisionTarget(vlm)


def tokenizer(names: tuple[str, ...] = NAMES) -> Any:
    """Return a tokenizer of bytes and the tokens that frame an image."""
    extra = [*names, *(f"<|{i}|>" for i in range(len(names), VOCAB - 256))]
    return byte_tokenizer(tuple(extra))


def prompt_with(
    name: str,
    sizes: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    text: str = "ab {} cde, {} what is it?",
) -> ImagePrompt:
    """Return a prompt of a text with images in the place of its braces.

    Args:
        name: the family.
        sizes: patches of each image, down and across, before merging; of Qwen alone.
        seed: of the images' pixels.
        text: has at least as many pairs of braces as there are images.
    """
    parts = text.split("{}")
    ids: list[int] = list(parts[0].encode())
    for number, part in enumerate(parts[1:]):
        if number < len(sizes):
            down, across = sizes[number]
            slots = down * across // 4 if name in PATCHES else _SLOTS.get(name, 4)
            ids += [START, *[IMAGE] * slots, END]
        ids += part.encode()
    inputs = _pixels(name, sizes, seed) if sizes else {}
    return ImagePrompt(mx.array([ids]), inputs)


def _pixels(
    name: str, sizes: Sequence[tuple[int, int]], seed: int
) -> dict[str, mx.array]:
    key = mx.random.key(1000 + seed)
    count = len(sizes)
    if name in QWEN:
        patches = sum(down * across for down, across in sizes)
        return {
            "pixel_values": mx.random.normal((patches, 96), key=key),
            "image_grid_thw": mx.array([[1, down, across] for down, across in sizes]),
        }
    if name == "lfm2_vl":
        sides = mx.array([list(size) for size in sizes])
        most = max(down * across for down, across in sizes)
        filled = mx.arange(most)[None] < (sides[:, 0] * sides[:, 1])[:, None]
        return {
            "pixel_values": mx.random.normal((count, most, 48), key=key),
            "spatial_shapes": sides,
            "pixel_attention_mask": filled.astype(mx.int32),
        }
    shape: tuple[int, ...] = (count, 3, 16, 16)
    if name in {"smolvlm", "idefics3"}:
        shape = (1, *shape)
    pixels = mx.random.normal(shape, key=key)
    if name == "gemma4":
        pixels = mx.sigmoid(pixels)
    found = {"pixel_values": pixels}
    if name in {"pixtral", "mistral3"}:
        found["image_sizes"] = mx.array([[16, 16]] * count)
    return found
