"""Processor files of vision families, for the tiny models.

They are as transformers' `save_pretrained` writes them. Images are cut and scaled by
the processor code of their family.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("<|start|>", "<|end|>", "<image>", "<|video|>")


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """The files of a processor."""

    marker: str  # stands for an image in a text
    # Tokens with ids from 256 on; the third is in the slots of an image
    names: tuple[str, ...] = NAMES
    image_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)  # tokenizer's attributes
    model: dict[str, Any] = field(default_factory=dict)  # further keys of config.json
    fixed: bool = False  # all images are scaled to one size


PROCESSORS: dict[str, VisionFiles] = {
    name: VisionFiles(**{**said, "names": tuple(said.get("names", NAMES))})
    for name, said in json.loads(
        Path(__file__).with_suffix(".json").read_text("utf-8")
    ).items()
}
