"""Every command in a shell block of the README and the documentation is valid.

Our commands run on the smallest bundled model; long ones run in slow tests only, and
`serve` is only parsed. Commands of other programs do not run; the functions that check
them say why.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from mlx_speculation.cli.app import app
from mlx_speculation.cli.commands import demo as demo_command
from support.pages import ROOT, TEXTS, commands, name_of
from support.pages_folder import fill
from support.processes.reader import Reader, Said

OURS = "mlx-speculation"
SHOWN = [(name_of(page), words) for page in TEXTS for words in commands(page)]
# Options added to the shown commands, to limit their tokens and passes.
CHEAPLY = {
    "generate": ("--max-tokens", "8"),
    "chat": ("--max-tokens", "8"),
    "benchmark": ("--max-tokens", "4", "--passes", "1", "--prompt", "def"),
    "check": ("--tokens", "8", "--places", "2"),
    "demo": ("--max-tokens", "4"),
    "report": ("--tokens", "8", "--passes", "1", "--yes"),
    "train": (
        *("--dialogues", "16", "--held-out", "8", "--batch", "8"),
        *(
            "--answer-tokens",
            "24",
            "--prompt-tokens",
            "16",
            "--rows",
            "2",
            "--slots",
            "64",
        ),
        *("--steps", "2", "--evaluations", "1", "--skip-speed"),
    ),
}


def ours() -> list[tuple[str, ...]]:
    shown = {tuple(words[1:]) for _, words in SHOWN if words[0] == OURS}
    return sorted(shown)


def parsed(words: tuple[str, ...]) -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    with command.make_context(words[0], list(words[1:])) as context:
        return dict(context.params)


def test_there_are_commands_of_every_kind() -> None:
    group: Any = typer.main.get_command(app)
    assert {words[0] for words in ours()} == set(group.commands)


@pytest.mark.parametrize("words", ours(), ids=" ".join)
def test_our_commands_are_parsed(words: tuple[str, ...]) -> None:
    assert parsed(words) is not None


# Quick tests leave out these commands. `serve` does not end by itself, and
# tests/cli/commands/test_serve.py runs it. The others take minutes.
NOT_RUN = ("serve", "demo", "calibrate", "report", "train")
# A benchmark takes seconds, so quick tests run only the last of `COMPARED`.
COMPARED = [each for each in ours() if each[0] == "benchmark"]
LONGER = [each for each in ours() if each[0] in NOT_RUN[1:] or each in COMPARED[:-1]]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    fill(folder)
    return folder


@pytest.mark.parametrize(
    "words",
    [each for each in ours() if each[0] != "serve" and each not in LONGER],
    ids=" ".join,
)
def test_our_commands_run(words: tuple[str, ...], folder: Path, reader: Reader) -> None:
    done = run(words, folder, reader)
    assert done.status == 0, done.out
    assert done.out


@pytest.mark.slow
@pytest.mark.parametrize("words", LONGER, ids=" ".join)
def test_our_longer_commands_run(
    words: tuple[str, ...], folder: Path, reader: Reader
) -> None:
    done = run(words, folder, reader)
    assert done.status == 0, done.out


def run(words: tuple[str, ...], folder: Path, reader: Reader) -> Said:
    more = CHEAPLY.get(words[0], ())
    if words[0] == "train":
        more = (*more, "--out", "trained-" + "-".join(words).replace("/", "."))
    return reader.command([*words, *more], folder, "What is a stack?\n")


def test_the_demo_that_is_not_run_here_is_tested_elsewhere() -> None:
    assert demo_command.__doc__
    assert (ROOT / "tests/cli/test_cli.py").is_file()


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return set(project["optional-dependencies"])


def _pip(words: list[str]) -> None:
    """Installing needs a network and takes minutes: only the extras are checked."""
    assert words[1] == "install", words
    for named in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(named.split(",")) <= extras(), words


def _make(words: list[str]) -> None:
    """The command makes environments: only its targets in the Makefile are checked."""
    text = (ROOT / "Makefile").read_text("utf-8")
    for target in words[1:]:
        assert re.search(rf"^{target}:", text, re.MULTILINE), words


def _script(words: list[str]) -> None:
    """The script measures for minutes: only its file and options are checked."""
    script = ROOT / words[1]
    assert script.is_file(), words
    texts = [script, *(ROOT / "scripts").rglob("*.py")]
    known = "".join(file.read_text("utf-8") for file in texts)
    for option in words[2:]:
        if option.startswith("--"):
            assert f'"{option}"' in known, option


def _launch(words: list[str]) -> None:
    """The command starts ranks; tests/engine/distributed runs similar programs."""
    assert words[-1] == "talk.py", words
    assert words[1:3] in (["--backend", "ring"], ["--backend", "nccl"]), words


def _curl(words: list[str]) -> None:
    """The command needs a server; tests/server sends such requests over sockets."""
    assert words[1].startswith("http://127.0.0.1:8080/v1/"), words


def _shell(words: list[str]) -> None:
    """The command changes the shell, or prepares the environment of the tests."""
    assert words in (
        ["git", "clone", "https://github.com/mlx-speculation/mlx-speculation"],
        ["cd", "mlx-speculation"],
        ["python3", "-m", "venv", ".venv"],
        [".", ".venv/bin/activate"],
    ), words


OTHERS: dict[str, Callable[[list[str]], None]] = {
    "pip": _pip,
    "make": _make,
    "python": _script,
    "mlx.launch": _launch,
    "curl": _curl,
    "python3": _shell,
    "git": _shell,
    "cd": _shell,
    ".": _shell,
}


def test_other_programs_are_called_as_they_can_be() -> None:
    for page, words in SHOWN:
        if words[0] != OURS:
            assert words[0] in OTHERS, f"{page}: {words}"
            OTHERS[words[0]](words)
