"""The demonstration models of the repository, and the bundled prompts.

A package that was installed from a wheel has the prompts only. A function whose files
are missing raises `DemoModelsMissingError`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_speculation.errors import DemoModelsMissingError

_FOLDER = Path(__file__).parent
_CLONE = "git clone https://github.com/mlx-speculation/mlx-speculation"
DEMO_TARGETS = ("dense", "sliding", "hybrid")
_MODELS = (*DEMO_TARGETS, "draft", "assistant", "eagle")


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One bundled prompt."""

    group: str  # the kind of text, such as "code"
    text: str
    source: str = ""  # origin of the text; empty: it was written for the demo


@dataclass(frozen=True, slots=True)
class Story:
    """A conversation; or, as the only turn, the beginning of a text to continue."""

    name: str
    turns: Sequence[str]  # messages of the user
    about: str = ""  # the story in a few words
    system: str | None = None
    prediction: str | None = None  # text that the answer may repeat


def demo_models() -> dict[str, Path]:
    """Return the folders of the demonstration models, by name.

    The targets "dense", "sliding" and "hybrid" have different kinds of caches. "draft"
    drafts for all three, "assistant" for "sliding", and "eagle" for "dense".

    Raises:
        DemoModelsMissingError: A folder is not in this installation.
    """
    folders = {name: _FOLDER / name for name in _MODELS}
    missing = [
        name
        for name, path in folders.items()
        if not (path / "model.safetensors").is_file()
    ]
    if missing:
        raise DemoModelsMissingError(
            f"Of the {len(folders)} demonstration models, {len(missing)} are not in "
            f"{_FOLDER}: {', '.join(missing)}. They have 47 MB and are only in the "
            f"repository. Run '{_CLONE}'. Then, in its folder, run 'make demo', or "
            "'pip install -e .' in this environment."
        )
    return folders


def demo_prompts() -> list[DemoPrompt]:
    """Return the bundled prompts, in the order of their file."""
    return [DemoPrompt(**row) for row in _rows("prompts.json")]


def chat_prompts() -> list[DemoPrompt]:
    """Return the bundled messages for chat models, one of each group."""
    return [DemoPrompt(**row) for row in _rows("chat_prompts.json")]


def chat_stories() -> list[Story]:
    """Return the bundled stories for chat models, in the order of their file."""
    return [Story(**row) for row in _rows("stories.json")]


def _rows(name: str) -> list[dict[str, Any]]:
    path = _FOLDER / name
    if not path.is_file():
        raise DemoModelsMissingError(
            f"the demonstration prompts are missing: no file {path}; reinstall "
            "mlx-speculation"
        )
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def one_prompt_per_group() -> list[DemoPrompt]:
    """Return the first bundled prompt of each group of texts."""
    first: dict[str, DemoPrompt] = {}
    for prompt in demo_prompts():
        first.setdefault(prompt.group, prompt)
    return list(first.values())
