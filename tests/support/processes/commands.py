"""Runs the command line in this process, in which mlx is already imported."""

import json
from functools import cache
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from mlx_speculation.blas import BlasChoice
from mlx_speculation.cli.app import app
from mlx_speculation.cli.run_app import FAILED, USAGE

# Cached, since it reads the signatures of all commands, which takes long.
command_of = cache(typer.main.get_command)


class Commands:
    """Runs commands; a traceback fails the test.

    The choice of a BLAS is replaced, since a process cannot repeat it. Rounds are timed
    in one pass, since tests of commands need no exact costs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "mlx_speculation.cli.load_pair.use_blas",
            lambda name: BlasChoice("stock", name),
        )
        monkeypatch.setattr("typer.testing._get_command", command_of)
        home = "mlx_speculation.engine.draft_length.calibration"
        monkeypatch.setattr(f"{home}.PASSES", 1)

    def __call__(
        self, *options: Any, text: str | bytes | None = None, colour: bool = False
    ) -> Result:
        """Run a command with standard input `text`, in colours if `colour`."""
        runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})
        done = runner.invoke(
            app, [str(option) for option in options], input=text, color=colour
        )
        ended = done.exception is None or isinstance(done.exception, SystemExit)
        assert ended, repr(done.exception)
        assert "Traceback" not in done.output
        return done

    def object(self, *options: Any, status: int = 0) -> dict[str, Any]:
        """Run a command with --json, and return its object."""
        done = self(*options, "--json")
        assert done.exit_code == status, done.output
        assert done.stdout.count("\n") == 1
        data: dict[str, Any] = json.loads(done.stdout)
        return data

    def refused(self, *options: Any, text: str | bytes | None = None) -> str:
        """Run a command that ends with a user's error, and return the error's line."""
        done = self(*options, text=text)
        assert done.exit_code in (FAILED, USAGE), done.output
        assert done.stdout == ""
        lines = [line for line in done.stderr.splitlines() if "error: " in line]
        assert len(lines) == 1, done.stderr
        return lines[0].removeprefix("error: ")
