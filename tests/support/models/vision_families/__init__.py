"""Tiny models of mlx-vlm's families: configs, and images for prompts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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

_CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).parent.with_suffix(".json").read_text("utf-8")
)
FAMILIES: dict[str, TinyFamily] = {
    name: replace(family, config=_CONFIGS[name])
    for module in (axes, gemma, one_token, patched, placed, qwen, square)
    for name, family in module.FAMILIES.items()
}
REFUSED: dict[str, TinyFamily] = {
    name: replace(family, config=_CONFIGS[name])
    for name, family in {**axes.REFUSED, **gemma.REFUSED}.items()
}
