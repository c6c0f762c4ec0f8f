"""Processor files of vision families, for the tiny models.

    PROCESSORS    by family; prompts of other families are tensors, see `tiny_vision`

Each entry has the names of the tokens from 256 on, the files as transformers'
`save_pretrained` writes them, and the marker of an image in a text. Images are cut and
scaled by the processor code of their family.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("<|start|>", "<|end|>", "<image>", "<|video|>")


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """The files of a processor.

    Attributes:
        marker: stands for an image in a text.
        names: names of the tokens from 256 on; the third one stands for a slot.
        image_processor: content of preprocessor_config.json.
        processor: content of processor_config.json; empty: there is no such file.
        special: attributes of the tokenizer, and the tokens that they name.
        model: further keys of config.json.
        fixed: whether all images are scaled to one size.
    """

    marker: str
    names: tuple[str, ...] = NAMES
    image_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    fixed: bool = False


PROCESSORS: dict[str, VisionFiles] = {
    name: VisionFiles(**{**said, "names": tuple(said.get("names", NAMES))})
    for name, said in json.loads(
        Path(__file__).with_suffix(".json").read_text("utf-8")
    ).items()
}
