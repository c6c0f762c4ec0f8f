"""Runs scripts in this process, on a tiny model with short prompts."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import save_config, save_model
from typer.testing import CliRunner

from mlx_speculation.demo import DemoPrompt
from support.models.tiny_models import TINY_MODELS, build
from support.models.tiny_tokenizer import byte_tokenizer

PROMPTS = [
    DemoPrompt("code", "def f(n):\n    return", "a"),
    DemoPrompt("code", "def g(n):\n    return", "b"),
    DemoPrompt("prose", "The first of them, and the first", "c"),
    DemoPrompt("edit", "x = 1\ny = 2\nx = 1\n", "d"),
]


def save_tiny(folder: Path, name: str = "llama") -> Path:
    """Save a tiny model with random weights and a tokenizer, in mlx-lm's layout."""
    tiny = TINY_MODELS[name]
    folder.mkdir()
    save_model(folder, build(name))
    save_config({**tiny.args, "model_type": tiny.module}, folder / "config.json")
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    return folder


def run_script(
    script: str, folder: Path, options: str = "", *arguments: str
) -> dict[str, Any]:
    """Run a script with one model as target and draft model; return the report."""
    app = importlib.import_module(script).app
    taken = app.registered_commands[0].callback.__annotations__
    models = {"target": "--target", "draft_model": "--draft-model"}
    named = [models[name] for name in models if name in taken]
    command = [each for option in named for each in (option, str(folder))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.prompts.demo_prompts", lambda: PROMPTS)
        done = CliRunner().invoke(
            app,
            [*arguments, *command, "--blas", "stock", *options.split()],
            catch_exceptions=False,
        )
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report.keys() >= {"machine", "versions", "blas", "arguments", "results"}
    return report
