"""Folders of tiny vision models with a processor, as `from_pretrained` takes them."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from support.models import mtp_checkpoints
from support.models.tiny_models import randomise
from support.models.tiny_vision import FAMILIES, VOCAB, tiny, tokenizer
from support.models.vision_processors import PROCESSORS

END, END_ID = "<|4|>", 260
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}MARKER"
    "{% elif c.type == 'text' %}{{ c.text or c.content }}{% endif %}"
    "{% endfor %}{% endif %}"
    f"{END}{{% endfor %}}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def vision_folder(folder: Path, name: str = "qwen3_vl", **text_config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    target, files = tiny(name, **text_config), PROCESSORS[name]
    config: dict[str, Any] = {"model_type": name, **copy.deepcopy(FAMILIES[name])}
    config.get("text_config", config).update(text_config)
    if name == "qwen2_5_vl":  # its files have the text's keys at the top
        config = {**config.pop("text_config"), **config}
    config |= {"vocab_size": VOCAB, "eos_token_id": END_ID, **files.model}
    write(folder / "config.json", config)
    flat: Any = tree_flatten(target.vlm.parameters())
    weights = folder / "model.safetensors"
    mx.save_safetensors(str(weights), dict(flat), {"format": "mlx"})
    inner = tokenizer(files.names)._tokenizer
    inner.add_special_tokens(
        {
            "eos_token": END,
            "pad_token": END,
            "additional_special_tokens": list(files.names),
        }
    )
    inner.chat_template = TEMPLATE.replace("MARKER", files.marker)
    inner.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    write(folder / "tokenizer_config.json", {**settings, **files.special})
    if files.image_processor:
        write(folder / "preprocessor_config.json", files.image_processor)
    if files.processor:
        write(folder / "processor_config.json", files.processor)
    return folder


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def picture(
    width: int = 24, height: int = 16, seed: int = 0, kind: str = "PNG"
) -> bytes:
    from PIL import Image

    shape = (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def with_mtp_head(folder: Path, name: str) -> None:
    """Put an MTP head with random weights into a folder that `vision_folder` wrote."""
    target, layout = tiny(name), mtp_checkpoints.LAYOUTS[name]
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["text_config"]["mtp_num_hidden_layers"] = 1
    config["mlx_lm_extra_tensors"] = {"mtp_file": "head.safetensors"}
    write(folder / "config.json", config)
    flat: Any = tree_flatten(target.vlm.parameters())
    index = {"weight_map": {name: "model.safetensors" for name, _ in flat}}
    write(folder / "model.safetensors.index.json", {"metadata": {}, **index})
    head = mtp_checkpoints.make_head(layout, target, config)
    randomise(head, embedding=1.0)
    tensors = mtp_checkpoints.head_tensors(layout, target, head, raw=False)
    mx.save_safetensors(str(folder / "head.safetensors"), tensors, {"format": "mlx"})
