"""The command line as a user runs it, on the bundled models."""

import os
import subprocess
import sys
from dataclasses import replace
from inspect import getdoc
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mlx_speculation
from mlx_speculation.cli.app import app
from mlx_speculation.cli.commands.check import check
from mlx_speculation.demo import one_prompt_per_group
from mlx_speculation.engine.equivalence import texts
from mlx_speculation.engine.equivalence.texts import Parting
from support.processes.commands import Commands

DEMO = "mlx_speculation.cli.commands.demo"
PROMPT = "def add(first, second):\n"


@pytest.mark.parametrize("groups", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_demo_finds_the_same_tokens_for_every_target_and_group(
    groups: int, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are cut: tests use the stock BLAS, which is slow."""
    prompts = [replace(each, text=each.text[:20]) for each in one_prompt_per_group()]
    monkeypatch.setattr(f"{DEMO}.one_prompt_per_group", lambda: prompts[:groups])
    monkeypatch.setattr(f"{DEMO}._Teller._warm", lambda *_: None)
    # With a fixed length the demo does not calibrate.
    done = commands("demo", "--max-tokens", "2", "--draft-length", "1")
    assert done.exit_code == 0, done.output
    for target in ("dense", "sliding", "hybrid"):
        assert done.stdout.count(f"{target}: ") == groups
    assert done.stdout.count("yes") + done.stdout.count("near-tie at") == 3 * groups


@pytest.mark.usefixtures("small_demo")
def test_demo_fails_where_a_text_really_differs(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parted(*_: Any, **__: Any) -> Parting:
        return Parting(3, 1, 2, margin=0.5, difference=0.0, allowed=0.0, edge=1.0)

    monkeypatch.setattr(texts, "find_parting", parted)
    done = commands("demo", "--max-tokens", "2", "--draft-length", "1")
    assert done.exit_code == 1
    assert "not at 3" in done.stdout


def test_next_to_nothing_is_loaded_before_ctrl_c_is_looked_after() -> None:
    """Modules that Python itself loads at its start are left out of the comparison."""
    code = """
import os, signal, sys
before = set(sys.modules)
from mlx_speculation.cli import main
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(mlx_speculation.__file__).parents[1])},
    )
    loaded = {
        name for name in done.stdout.split() if name.startswith("mlx_speculation")
    }
    assert loaded == {
        "mlx_speculation",
        "mlx_speculation.before_mlx",
        "mlx_speculation.cli",
        "mlx_speculation.errors",
    }
    assert not {"typing", "importlib.metadata", "typer"} & set(done.stdout.split())


def test_transformers_does_not_say_that_pytorch_is_missing() -> None:
    """A command may import transformers before mlx-lm, which silences it."""
    code = """
import importlib.util, sys

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda *of: None if of[0] == "torch" else find_spec(*of)
from mlx_speculation.cli import main
try:
    main()
except SystemExit:
    import transformers
    print(transformers.is_torch_available())
"""
    silent = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # set here by mlx-lm
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != silent},
    )
    assert done.stdout.endswith("False\n")
    assert done.stderr == ""


@pytest.mark.parametrize(
    "when",
    [
        "sys.meta_path.insert(0, Now())",
        "atexit.register(interrupt)",
    ],
)
def test_ctrl_c_before_and_after_a_command_is_no_traceback(when: str) -> None:
    """Ctrl-C can come while Python imports the commands, or while it exits."""
    code = f"""
import atexit, os, signal, sys

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

class Now:
    def find_spec(self, *_):
        interrupt()

from mlx_speculation.cli import main
{when}
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_help_is_wrapped_by_the_terminal_alone() -> None:
    """The line ends of a docstring do not end lines of the help."""
    shown = CliRunner().invoke(app, ["check", "--help"], terminal_width=80).stdout
    lines = [line.strip() for line in shown.splitlines()]
    paragraph = str(getdoc(check)).split("\n\n")[1].splitlines()
    assert not set(paragraph[:-1]) & set(lines)
    assert " ".join(paragraph) in " ".join(lines)
