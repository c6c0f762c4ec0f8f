"""The command line as a user runs it, on the bundled models."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mlx_speculation
from mlx_speculation import Sampling, SpeculativeGenerator, demo_models
from mlx_speculation.cli.app import app
from mlx_speculation.demo import DemoPrompt, one_prompt_per_group
from mlx_speculation.engine.equivalence import texts
from mlx_speculation.engine.equivalence.texts import Parting
from support.processes.commands import Commands
from support.processes.programs import command_line

DEMO = "mlx_speculation.cli.commands.demo"
PROMPT = "def add(first, second):\n"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """Run commands in this process, whose BLAS is fixed: mlx is already imported."""
    Commands(monkeypatch)
    return CliRunner(env={"COLUMNS": "120"})


def test_generate_prints_the_text_alone_on_standard_output(
    in_process: CliRunner,
) -> None:
    """tests/cli/commands/test_generate.py runs `generate` in a separate process."""
    folder = demo_models()["draft"]
    options = ["--temperature", "0.8", "--top-p", "0.9", "--seed", "7"]
    sizes = ["--max-tokens", "20", "--draft-length", "3", "--blas", "stock"]
    pair = ["generate", str(folder), "--draft", str(folder)]
    done = in_process.invoke(app, [*pair, *options, *sizes], input=PROMPT)
    assert done.exit_code == 0, done.stderr
    generator = SpeculativeGenerator.from_pretrained(folder)
    expected = generator.generate(
        PROMPT,
        max_tokens=20,
        sampling=Sampling(temperature=0.8, top_p=0.9, seed=7),
    )
    assert done.stdout == expected.text + "\n"
    assert "BLAS: " in done.stderr
    assert f"{len(expected.tokens)} tokens ({expected.finish_reason}), " in done.stderr
    assert "drafted tokens accepted, " in done.stderr
    done = in_process.invoke(
        app, ["generate", str(folder), "--prompt", PROMPT, "--max-tokens", "5"]
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == generator.generate(PROMPT, max_tokens=5).text + "\n"


@pytest.mark.slow  # test_user_errors.py tests this without a process
def test_an_error_of_the_package_is_one_line_and_status_one() -> None:
    done = subprocess.run(
        command_line("generate", "missing", "--prompt", "x"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "error: There is no folder 'missing'" in done.stderr
    assert "Traceback" not in done.stderr


def _keep_length(self: Any, draft_length: int | None, text: str) -> None:
    """Calibrate nothing, and decode nothing to warm up."""
    self._draft_length = draft_length


@pytest.mark.parametrize("groups", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_demo_finds_the_same_tokens_for_every_target_and_group(
    groups: int, in_process: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are cut, since the stock BLAS is slow; tests/docs runs the whole demo."""
    prompts = [replace(each, text=each.text[:20]) for each in one_prompt_per_group()]
    monkeypatch.setattr(f"{DEMO}.one_prompt_per_group", lambda: prompts[:groups])
    monkeypatch.setattr(f"{DEMO}._Teller.warm", _keep_length)
    # A fixed length needs no calibration, which test_calibrate_prints_... tests.
    done = in_process.invoke(app, ["demo", "--max-tokens", "2", "--draft-length", "1"])
    assert done.exit_code == 0, done.output
    for target in ("dense", "sliding", "hybrid"):
        assert done.stdout.count(f"{target}: ") == groups
    assert done.stdout.count("yes") + done.stdout.count("near-tie at") == 3 * groups


def test_demo_fails_where_a_text_really_differs(
    in_process: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parted(*_: Any, **__: Any) -> Parting:
        return Parting(3, 1, 2, margin=0.5, difference=0.0, allowed=0.0, edge=1.0)

    monkeypatch.setattr(texts, "find_parting", parted)
    draft = demo_models()["draft"]  # the smallest: the stock BLAS is slow
    monkeypatch.setattr(f"{DEMO}.demo_models", lambda: {"dense": draft, "draft": draft})
    prompt = DemoPrompt("code", "a test", PROMPT)
    monkeypatch.setattr(f"{DEMO}.one_prompt_per_group", lambda: [prompt])
    done = in_process.invoke(app, ["demo", "--max-tokens", "2", "--draft-length", "1"])
    assert done.exit_code == 1
    assert "not at 3" in done.stdout


def test_calibrate_prints_what_rounds_cost(
    in_process: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path))
    options = ["calibrate", str(demo_models()["draft"]), "--draft", "lookup"]
    done = in_process.invoke(app, [*options, "--batch", "2"])
    assert done.exit_code == 0, done.output
    assert "plain" in done.stdout
    assert "512" in done.stdout
    assert "a round of 2 requests" in done.stdout
    assert len(list((tmp_path / "costs").glob("*.json"))) == 2


def test_next_to_nothing_is_loaded_before_ctrl_c_is_looked_after() -> None:
    """Python's own start is not counted: nobody can catch Ctrl-C there."""
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
    # Python's own start may have loaded some of these already.
    assert not {"typing", "importlib.metadata", "typer"} & set(done.stdout.split())


@pytest.mark.parametrize(
    "when",
    [
        "sys.meta_path.insert(0, Now())",
        "atexit.register(interrupt)",
    ],
)
def test_ctrl_c_before_and_after_a_command_is_no_traceback(when: str) -> None:
    """Python takes a second to import the commands, and a moment to exit."""
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
    assert any(line.startswith("once and token by token.") for line in lines)
