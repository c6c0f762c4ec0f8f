"""What the processors of vision families read from a folder, for the tiny models.

    PROCESSORS    by family; prompts of others are tensors, see `tiny_vision`

Each gives the names of the tokens 256 and on, the files as transformers'
`save_pretrained` writes them, and the marker of an image in a text. Images are cut and
scaled by the family's own code.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from support.models.tiny_vision import NAMES

_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_SQUARE = {"height": 16, "width": 16}


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """The files of a processor.

    Attributes:
        marker: stands for an image in a text.
        names: of the tokens from 256 on; the third one stands for a slot.
        image_processor: what preprocessor_config.json says.
        processor: what processor_config.json says; empty: there is no such file.
        special: attributes of the tokenizer, and the tokens that they name.
        model: what config.json says beside the model's own.
        fixed: whether images of all sizes are scaled to one.
    """

    marker: str
    names: tuple[str, ...] = ("<|start|>", "<|end|>", "<image>", "<|video|>")
    image_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    fixed: bool = False


_QWEN = VisionFiles(
    marker="<|vision_start|><|image_pad|><|vision_end|>",
    names=NAMES,
    image_processor={
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 64,
        "max_pixels": 1024,
    },
)
_GLM = VisionFiles(
    marker="<|begin_of_image|><|image|><|end_of_image|>",
    names=("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
    image_processor={
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 128, "longest_edge": 2048},
    },
)
_MEDIA = VisionFiles(
    marker="<|media_pad|>",
    names=("<|media_start|>", "<|media_end|>", "<|media_pad|>", "<|video|>"),
    image_processor={
        "media_proc_cfg": {
            "patch_size": 4,
            "in_patch_limit": 48,
            "merge_kernel_size": 2,
        }
    },
)
_PIXTRAL = VisionFiles(
    marker="[IMG]",
    names=("[IMG_BREAK]", "[IMG_END]", "[IMG]", "<|video|>"),
    image_processor={
        **_HALF,
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": 4, "width": 4},
        "size": {"longest_edge": 16},
    },
    processor={"patch_size": 4, "spatial_merge_size": 1},
)


def _tiles(kind: str) -> VisionFiles:
    """Return files of a family that cuts a large image into tiles, beside the whole."""
    return VisionFiles(
        marker="<image>",
        names=("<fake_token_around_image>", "<global-img>", "<image>", "<|video|>"),
        image_processor={
            **_HALF,
            "image_processor_type": kind,
            "do_image_splitting": True,
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        },
        processor={"image_seq_len": 4},
    )


PROCESSORS: dict[str, VisionFiles] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": VisionFiles(
        marker="<start_of_image>",
        names=("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<|video|>"),
        image_processor={
            **_HALF,
            "image_processor_type": "Gemma3ImageProcessor",
            "size": _SQUARE,
        },
        processor={"image_seq_length": 4},
        special={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        fixed=True,
    ),
    "gemma4": VisionFiles(
        marker="<|image|>",
        names=("<|image>", "<image|>", "<|image|>", "<|video|>"),
        processor={
            "image_processor": {
                "patch_size": 4,
                "max_soft_tokens": 4,
                "pooling_kernel_size": 2,
            }
        },
        special={
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
        },
    ),
    "llava": VisionFiles(
        marker="<image>",
        image_processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 16},
            "crop_size": _SQUARE,
        },
        processor={"patch_size": 8, "vision_feature_select_strategy": "full"},
        fixed=True,
    ),
    "smolvlm": _tiles("SmolVLMImageProcessor"),
    "idefics3": _tiles("Idefics3ImageProcessor"),
    "aya_vision": VisionFiles(
        marker="<image>",
        names=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<image>"),
        image_processor={
            **_HALF,
            "image_processor_type": "GotOcr2ImageProcessor",
            "processor_class": "AyaVisionProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            "size": _SQUARE,
        },
        processor={
            "processor_class": "AyaVisionProcessor",
            "patch_size": 4,
            "img_size": 16,
            "downsample_factor": 2,
        },
    ),
    "internvl_chat": VisionFiles(
        marker="<image>",
        names=("<img>", "</img>", "<IMG_CONTEXT>", "<|video|>"),
        model={"max_dynamic_patch": 4},
    ),
    "lfm2_vl": VisionFiles(
        marker="<image>",
        names=("<|image_start|>", "<|image_end|>", "<image>", "<|video|>"),
        image_processor={
            "encoder_patch_size": 4,
            "downsample_factor": 2,
            "min_image_tokens": 1,
            "max_image_tokens": 4,
            "tile_size": 16,
        },
    ),
    "pixtral": _PIXTRAL,
    "mistral3": _PIXTRAL,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm_ocr": _GLM,
    "kimi_k25": _MEDIA,
    "mage_vl": replace(
        _QWEN, image_processor={**_QWEN.image_processor, "temporal_patch_size": 1}
    ),
    "mimo_v2": _QWEN,
    "cohere_compass": replace(
        _QWEN,
        marker="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        names=("<|VISION_START|>", "<|VISION_END|>", "<|IMAGE_PAD|>", "<|video|>"),
    ),
    "muse_glimmer": VisionFiles(
        marker="<|patch|>",
        names=("<|start|>", "<|end|>", "<|patch|>", "<|video|>"),
        processor={
            "image_processor": {
                "patch_size": 4,
                "temporal_patch_size": 2,
                "merge_size": 2,
                "max_image_tokens": 12,
            }
        },
    ),
    "idefics2": VisionFiles(
        marker="<image>",
        names=("<fake_token_around_image>", "<|end|>", "<image>", "<|video|>"),
        image_processor={
            **_HALF,
            "image_processor_type": "Idefics2ImageProcessor",
            "do_image_splitting": False,
            "size": {"longest_edge": 16, "shortest_edge": 8},
        },
        processor={"image_seq_len": 4},
        special={
            "image_token": "<image>",
            "image_boundary_token": "<fake_token_around_image>",
        },
    ),
    "internvl": VisionFiles(
        marker="<IMG_CONTEXT>",
        names=("<img>", "</img>", "<IMG_CONTEXT>", "<|video|>"),
        processor={"image_seq_length": 4},
        model={"max_dynamic_patch": 4},
    ),
    "llava_onevision": VisionFiles(
        marker="<image>",
        image_processor={
            **_HALF,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
            "size": _SQUARE,
        },
        processor={
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
        },
    ),
    "llava_next": VisionFiles(
        marker="<image>",
        image_processor={
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
            "size": {"shortest_edge": 16},
            "crop_size": _SQUARE,
        },
        processor={"patch_size": 4, "vision_feature_select_strategy": "default"},
    ),
}
