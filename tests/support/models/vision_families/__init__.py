"""Families of mlx-vlm, tiny: their configs, and prompts with their images."""

from support.models.vision_families import (
    axes,
    gemma,
    one_token,
    patched,
    placed,
    qwen,
    square,
)
from support.models.vision_families.parts import TinyFamily

FAMILIES: dict[str, TinyFamily] = {
    name: family
    for module in (axes, gemma, one_token, patched, placed, qwen, square)
    for name, family in module.FAMILIES.items()
}
REFUSED: dict[str, TinyFamily] = {**axes.REFUSED, **gemma.REFUSED}
