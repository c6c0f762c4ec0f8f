"""Folders of tiny models with a chat template, as `load` takes them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKS = ("<end>", "<system>", "<user>", "<assistant>")
VOCAB = 256 + len(MARKS)


def chat_folder(folder: Path, name: str = "llama", *, seed: int = 0) -> Path:
    """Write config.json, weights and a byte tokenizer whose end token is <end>."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny = TINY_MODELS[name]
    model = build(name, seed=seed, vocab=VOCAB)
    config: dict[str, Any] = {"model_type": tiny.module, **tiny.args}
    config |= {"vocab_size": VOCAB, "eos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    flat: Any = tree_flatten(model.parameters())
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(flat), {"format": "mlx"}
    )
    tokenizer = byte_tokenizer(MARKS)._tokenizer
    tokenizer.add_special_tokens(
        {"eos_token": MARKS[0], "additional_special_tokens": list(MARKS[1:])}
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
