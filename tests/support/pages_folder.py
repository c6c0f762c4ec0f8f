"""A folder with small bundled models at the paths that the documentation names."""

import json
import shutil
from pathlib import Path

from mlx_speculation import demo_models
from support.pages import ROOT

TARGET, DRAFT, HEAD = "path/of/target", "path/of/draft", "path/of/head"
UNTRAINED = "path/of/small"
CHAT = "HuggingFaceTB/SmolLM2-135M-Instruct"
PROMPTS = "prompts.jsonl"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def fill(folder: Path) -> None:
    """Put the smallest bundled model at the paths that the pages use.

    The folder `UNTRAINED` has only the model's config. The model at `CHAT` also has a
    chat template.
    """
    small = demo_models()["draft"]
    for name in (TARGET, DRAFT, HEAD):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(small)
    untrained = folder / UNTRAINED
    untrained.mkdir()
    shutil.copy(small / "config.json", untrained)
    # Some pages name bundled models by their paths in a checkout.
    (folder / "src").symlink_to(ROOT / "src")
    requests = [{"prompt": f"class Shape{number}:\n"} for number in range(16)]
    lines = "".join(f"{json.dumps(each)}\n" for each in requests)
    (folder / PROMPTS).write_text(lines, encoding="utf-8")
    chat = folder / CHAT
    shutil.copytree(small, chat)
    file = chat / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(config | {"chat_template": TEMPLATE}), encoding="utf-8")
