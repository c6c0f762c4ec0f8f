"""A process that runs the code and commands of the documentation as a user would.

It uses OpenBLAS if installed, as users' programs do. Tests use the reference BLAS,
which takes three to ten times as long; so tests of large matrices, marked `openblas`,
run here too. One process runs everything, since importing the package takes seconds.
"""

import io
import json
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest

from support.processes.programs import python

ROOT = Path(__file__).parents[3]
PROGRAM = "from support.processes.reader import serve; serve()"


@dataclass(frozen=True, slots=True)
class Said:
    out: str
    err: str
    status: int = 0


class Reader:
    """A client of the process; the first request starts the process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def program(self, path: Path) -> Said:
        return self._ask({"program": str(path)})

    def snippets(self, page: str, blocks: list[str], folder: Path) -> Said:
        """Run pieces of code in one namespace; `page` is their name in tracebacks."""
        return self._ask({"page": page, "blocks": blocks, "folder": str(folder)})

    def command(self, words: list[str], folder: Path, text: str) -> Said:
        """Run a command of this package in a folder, with a text as standard input."""
        return self._ask({"command": words, "folder": str(folder), "text": text})

    def test(self, name: str) -> Said:
        return self._ask({"test": name, "folder": str(ROOT)})

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            assert self._process.returncode == 0

    def _ask(self, job: dict[str, Any]) -> Said:
        if self._process is None:
            paths = [str(ROOT / "src"), str(ROOT / "tests")]
            self._process = subprocess.Popen(
                python(PROGRAM),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "MLX_SPECULATION_BLAS": "auto",
                    "PYTHONPATH": os.pathsep.join(paths),
                },
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        assert not answer["error"], answer["error"]
        return Said(answer["out"], answer["err"], answer["status"])


def serve() -> None:
    """Run the requests on standard input, and answer each with a line."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # output of libraries must not mix with answers
        import mlx_speculation.engine  # noqa: F401  chooses the BLAS

        _answer(answers)


def _answer(answers: TextIO) -> None:
    for line in sys.stdin:
        out, err, error, status = io.StringIO(), io.StringIO(), "", 0
        with redirect_stdout(out), redirect_stderr(err):
            try:
                status = _run(json.loads(line))
            except BaseException:
                error = traceback.format_exc()
        said = {"out": out.getvalue(), "err": err.getvalue()}
        answers.write(json.dumps({**said, "error": error, "status": status}) + "\n")
        answers.flush()


@contextmanager
def _as_in_tests() -> Iterator[None]:
    """Make warnings errors, fix the default draft length, and shorten measurements."""
    from mlx_speculation.engine.draft_length import calibration
    from mlx_speculation.models.checkpoints import probe_text
    from support import usual_length

    usual_length.install()
    of = partial(probe_text.OwnText.of, steps=8)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("error")
        patch.setattr(probe_text.OwnText, "of", of)
        patch.setattr(calibration, "PASSES", 1)
        yield


def _run(job: dict[str, Any]) -> int:
    if "test" in job:
        os.chdir(job["folder"])
        options = ["-q", "-m", "", "-p", "no:cacheprovider", "--assert=plain"]
        return int(pytest.main([job["test"], *options]))
    with _as_in_tests():
        return _shown(job)


def _shown(job: dict[str, Any]) -> int:
    if "program" in job:
        runpy.run_path(job["program"], run_name="__main__")
        return 0
    os.chdir(job["folder"])
    if "command" in job:
        return _command(job["command"], job["text"])
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(job["blocks"], 1):
        exec(compile(block, f"{job['page']}, snippet {number}", "exec"), names)
    return 0


def _command(words: list[str], text: str) -> int:
    from typer.testing import CliRunner

    from mlx_speculation.blas import BlasChoice
    from mlx_speculation.cli import load_pair
    from mlx_speculation.cli.app import app

    chosen: Any = load_pair  # the BLAS is already chosen
    chosen.use_blas = lambda name="auto": BlasChoice("stock", name)
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, words, input=text)
    print(done.output, end="")  # noqa: T201
    return done.exit_code
