"""What the configs of tiny vision families share, and pixels as processors make them.

TinyFamily  a family's config, and how a prompt with its images looks
TEXT        a text model
TOWER       a vision tower of images of 16 x 16 pixels
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

START, END, IMAGE, VIDEO = range(256, 260)
VOCAB = 264
Size = tuple[int, int]
Sizes = Sequence[Size]
Pixels = Callable[[Sizes, mx.array], dict[str, mx.array]]

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
LLAMA = {**TEXT, "model_type": "llama"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TOWER: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model"}
IMAGE_IDS = {"image_token_id": IMAGE, "image_token_index": IMAGE}

IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
# Attention over latent keys and values (MLA)
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}

# Layers that keep states, in turns with attention
LINEAR: dict[str, Any] = {
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


def square(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 3, 16, 16]."""
    return {"pixel_values": mx.random.normal((len(sizes), 3, 16, 16), key=key)}


def nested(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [1, n, 3, 16, 16]: those of one prompt."""
    return {"pixel_values": square(sizes, key)["pixel_values"][None]}


def sized(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Images [n, 3, 16, 16], and their sizes in pixels [n, 2]."""
    return {**square(sizes, key), "image_sizes": mx.array([[16, 16]] * len(sizes))}


def patches(width: int, grid: str = "image_grid_thw", time: bool = True) -> Pixels:
    """Patches [all, width] of images of any size, and each one's rows and columns."""

    def made(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
        count = sum(down * across for down, across in sizes)
        sides = [[1, *size] if time else [*size] for size in sizes]
        return {
            "pixel_values": mx.random.normal((count, width), key=key),
            grid: mx.array(sides),
        }

    return made


def padded(sizes: Sizes, key: mx.array) -> dict[str, mx.array]:
    """Patches [n, most, 48], filled up to the image with most patches."""
    sides = mx.array([list(size) for size in sizes])
    most = max(down * across for down, across in sizes)
    filled = mx.arange(most)[None] < (sides[:, 0] * sides[:, 1])[:, None]
    return {
        "pixel_values": mx.random.normal((len(sizes), most, 48), key=key),
        "spatial_shapes": sides,
        "pixel_attention_mask": filled.astype(mx.int32),
    }


def merged(size: Size) -> int:
    """Four patches make a slot."""
    return size[0] * size[1] // 4


def four(size: Size) -> int:
    """Each image has four slots."""
    return 4


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """A family of mlx-vlm, tiny.

    Attributes:
        config: as config.json has it, without its `model_type`.
        pixels: makes the tensors of images of given sizes, in patches.
        slots: how many slots an image takes.
        frame: what stands before the slots of an image and behind them.
        located: makes tensors that say where the slots are, of the ids.
        image: the id that the processor writes; where it is -200, one for an image.
        adapt: makes small what of the model no config does.
    """

    config: dict[str, Any]
    pixels: Pixels = square
    slots: Callable[[Size], int] = four
    frame: tuple[list[int], list[int]] = ([START], [END])
    located: Callable[[mx.array], dict[str, mx.array]] | None = None
    image: int = IMAGE
    adapt: Callable[[Any], None] | None = None
