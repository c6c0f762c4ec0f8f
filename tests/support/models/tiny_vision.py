"""Tiny models of mlx-vlm's families with random weights, and prompts with images.

Images are random tensors of the shape that the family's processor makes. Images that
are cut into patches may differ in size; others have one size.
"""

import copy
import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_speculation.models.vision import ImagePrompt, VisionTarget
from support.models.tiny_tokenizer import byte_tokenizer
from support.models.vision_families import FAMILIES as TINY
from support.models.vision_families import parts
from support.models.vision_families.parts import TinyFamily

WITHOUT_MLX_VLM = pytest.mark.skipif(
    find_spec("mlx_vlm") is None, reason="mlx-vlm is not installed"
)
VOCAB = parts.VOCAB
NAMES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FAMILIES: dict[str, dict[str, Any]] = {
    name: family.config for name, family in TINY.items()
}
# The families of quick tests; the tests of `OTHERS` are slow.
KINDS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("gemma3", "gemma4", "llava", "smolvlm", "idefics3", "aya_vision"),
    *("internvl_chat", "lfm2_vl", "pixtral", "mistral3"),
)
OTHERS = [name for name in FAMILIES if name not in KINDS]
# Names of vectors that get random values. Other vectors keep the constructors' values.
_DRAWN = {
    "bias",
    "dt_bias",
    "A_log",
    "image_newline",
    "view_separator",
    "class_embedding",
}


def grid(names: Iterable[str] = FAMILIES) -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(n, marks=slow) if n in OTHERS else n for n in names]


def tiny(name: str, seed: int = 0, **text_config: Any) -> VisionTarget:
    return VisionTarget(build(name, TINY[name], seed, **text_config))


def build(name: str, family: TinyFamily, seed: int = 0, **text_config: Any) -> Any:
    config = copy.deepcopy({"model_type": name, **family.config})
    config.get("text_config", config).update(text_config)
    package: Any = importlib.import_module(f"mlx_vlm.models.{name}")
    _let_chunks_be_short()
    made = package.ModelConfig.from_dict(copy.deepcopy(config))
    # As mlx_vlm.load does; without a text_config, the text's keys are at the top.
    for part in ("text", "vision", "perceiver", "projector", "audio"):
        keys = config.get(f"{part}_config", config if part == "text" else None)
        kind = getattr(package, f"{part.title()}Config", None)
        if keys is not None and kind is not None:
            setattr(made, f"{part}_config", kind.from_dict(keys))
    vlm: nn.Module = package.Model(made)
    if family.adapt is not None:
        family.adapt(vlm)
    state = mx.random.key(seed)

    def randomised(key: str, value: Any) -> Any:
        nonlocal state
        if value.ndim < 2 and key not in _DRAWN:  # weight of a norm, or a scale
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
    return vlm


@cache
def _let_chunks_be_short() -> None:
    """Let recurrent layers read prompts in chunks of 8 rows, not 64, to save time."""
    from mlx_vlm.models.qwen3_5 import gated_delta

    gated_delta.gated_delta_chunked.__defaults__ = (None, 8)


def tokenizer(names: tuple[str, ...] = NAMES) -> Any:
    """Return a tokenizer whose tokens are bytes and the marks around an image."""
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

    `sizes` are rows and columns of patches, for images that are cut into patches.
    """
    family, parts = TINY[name], text.split("{}")
    ids: list[int] = list(parts[0].encode())
    for number, part in enumerate(parts[1:]):
        if number < len(sizes):
            before, after = family.frame
            ids += [*before, *[family.image] * family.slots(sizes[number]), *after]
        ids += part.encode()
    key = mx.random.key(1000 + seed)
    inputs = family.pixels(sizes, key) if sizes else {}
    array = mx.array([ids])
    if sizes and family.located is not None:
        inputs |= family.located(array)
    return ImagePrompt(array, inputs)
