"""`report`: the figures of all commands, without anything personal."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation import demo_models
from mlx_speculation.cli.commands import report
from mlx_speculation.cli.run_app import INTERRUPTED, USAGE
from support.processes.commands import Commands

OPTIONS = ["--draft", "lookup", "--tokens", "8", "--passes", "1", "--yes"]


def _unseen(done: int, total: int) -> None:
    """Show no progress."""


@pytest.mark.slow
def test_a_report_has_the_figures_of_all_commands_and_nothing_personal(
    commands: Commands, tmp_path: Path
) -> None:
    folder = tmp_path / "secret" / "tiny"
    shutil.copytree(demo_models()["draft"], folder)
    done = commands("report", str(folder), *OPTIONS, "--folder", str(tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert done.stdout == text
    written = (tmp_path / "report.json").read_text()
    page: dict[str, Any] = json.loads(written)
    assert page["model"] == "tiny"
    for personal in ("secret", str(Path.home()), str(Path.cwd()), "/tmp"):
        assert personal not in text
        assert personal not in written
    assert page["check"]["rows"]["verdict"] in text
    assert page["exact"]["same"] is True
    assert f"{page['calibrate']['seconds_by_context']['512']['0'] * 1e3:.1f}" in text
    arms = {arm["name"]: arm for arm in page["benchmark"]["arms"]}
    assert list(arms) == ["plain", "mlx-lm plain", "lookup adaptive", "lookup k=4"]
    for name, arm in arms.items():
        assert f"| {name} | {arm['speed']['median']:.1f} |" in text
    assert page["benchmark"]["drafts"] == ["lookup"]
    assert set(page) == {"model", "machine", "versions", *report.SHARED}


@pytest.mark.slow
def test_a_command_that_fails_leaves_its_error_without_the_path(tmp_path: Path) -> None:
    model = str(tmp_path / "private" / "empty")
    Path(model).mkdir(parents=True)
    measured = report._stage("check", ["check", model], _unseen)
    assert list(measured) == ["error"]
    assert measured["error"].startswith("error: ")
    assert "private" not in measured["error"]
    page = {
        "model": "empty",
        "machine": {"device_name": "M9", "cpu": ""},
        "versions": {},
    }
    text = report.markdown({**page, "check": measured})
    assert text.startswith("# mlx-speculation on M9\n")
    assert f"## check\n\nnot measured: {measured['error']}\n" in text


def test_the_facts_of_a_machine_are_shared_without_its_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Advice names the cache folder without its path."""
    (tmp_path / "someone").write_text("a file")
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "someone" / "cache"))
    measured = report._stage("doctor", ["doctor"], _unseen)
    assert "cannot be kept in cache," in json.dumps(measured["advice"])
    assert "someone" not in json.dumps(measured)
    assert measured["packages"]["mlx"]
    text = report.markdown(
        {"model": "", "machine": {"device_name": "", "cpu": "c"}, "versions": {}}
        | {"doctor": measured}
    )
    assert f"- BLAS: {measured['blas']}\n" in text


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    commands: Commands, tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing")
    done = commands("report", "model", "--folder", missing)
    assert done.exit_code == USAGE
    assert missing in done.stderr


def test_a_report_that_was_stopped_says_so(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = report._printed

    def printed(words: Any, progress: Any) -> Any:
        if words[0] == "doctor":
            return whole(words, progress)
        raise KeyboardInterrupt  # as Ctrl-C during the second command

    monkeypatch.setattr(report, "_printed", printed)
    done = commands("report", "model", "--folder", str(tmp_path), "--yes")
    assert done.exit_code == INTERRUPTED
    missing = "Not measured: check, exact, calibrate, benchmark."
    said = f"**Partial: stopped in check. {missing}**"
    assert said in done.stdout
    assert said in (tmp_path / "report.md").read_text()
    page = json.loads((tmp_path / "report.json").read_text())
    assert page["stopped"] == "check"


@pytest.mark.slow
def test_progress_of_a_command_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a terminal, a command prints a line from time to time."""
    line = "from mlx_speculation.cli import console; console.QUIET_SECONDS = 0.0"
    (tmp_path / "sitecustomize.py").write_text(line)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    seen: list[tuple[int, int]] = []
    model = str(demo_models()["draft"])
    words = ["check", model, "--exact", "8", "--context", "16"]
    measured = report._stage("exact", words, lambda *counts: seen.append(counts))
    assert measured["same"] is True
    total = seen[0][1]
    assert seen == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize(("drafted", "busy"), [(0.02, True), (0.05, False)])
def test_costs_of_a_busy_machine_are_named(drafted: float, busy: bool) -> None:
    costs = {"seconds_by_context": {"512": {"0": 0.04, "4": drafted}}}
    assert (report.BUSY in report._calibrate(costs)) == busy
