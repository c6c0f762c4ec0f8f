"""`report`: the figures of all commands, without anything personal."""

import json
import os
import re
import shutil
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_speculation import demo_models
from mlx_speculation.cli.commands import report
from mlx_speculation.cli.run_app import FAILED, INTERRUPTED, USAGE
from support.models.demo_folders import copy_of
from support.processes.commands import Commands

MODEL = str(demo_models()["draft"])
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
    assert list(arms) == [
        *("no draft", "mlx-lm, no draft", "lookup adaptive", "lookup k=4")
    ]
    for name, arm in arms.items():
        assert f"| {name} | {arm['speed']['median']:.1f} |" in text
    assert page["benchmark"]["drafts"] == ["lookup"]
    assert f'by that of "{page["benchmark"]["plain"]}" in the same pass' in text
    assert "\n1 text of up to 8 tokens, equal to plain decoding's:\n" in text
    assert "\nExact mode: same bits on this machine, 0 of " in text
    assert "Device(" not in text + written
    assert set(page) == {*report.FACTS, "machine", "versions", *report.SHARED}


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


def test_a_wrong_model_is_refused_before_anything_runs(
    commands: Commands, tmp_path: Path
) -> None:
    earlier = tmp_path / "report.md"
    earlier.write_text("good")
    wrong = str(tmp_path / "nope")
    done = commands("report", wrong, "--folder", str(tmp_path), "--yes")
    assert done.exit_code == FAILED
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: There is no folder {wrong!r}")
    assert done.stderr.count("\n") == 1
    assert [*tmp_path.iterdir()] == [earlier]
    assert earlier.read_text() == "good"


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("yes", "answer", "written"),
    [(False, None, False), (True, None, True), (False, "y", True), (False, "n", False)],
)
def test_a_report_is_written_only_after_a_yes(
    *,
    earlier: bool,
    yes: bool,
    answer: str | None,
    written: bool,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """`answer` is given at a terminal; None: there is no terminal."""
    monkeypatch.setattr(report, "_run", lambda *_: ({}, None))
    terminal = SimpleNamespace(isatty=lambda: answer is not None)
    monkeypatch.setattr(report, "sys", SimpleNamespace(stdin=terminal))
    file = tmp_path / "report.md"
    if earlier:
        file.write_text("earlier")
    words = ["report", MODEL, "--folder", str(tmp_path), *(["--yes"] * yes)]
    done = commands(*words, text=answer)
    page = done.stdout.partition("This replaces" if earlier else "Write this")[0]
    assert page.startswith("# mlx-speculation on ")
    said = " ".join(done.output.split())
    if written:
        assert file.read_text() == page
        assert (tmp_path / "report.json").is_file()
        assert (f"This replaces the earlier {file}." in said) == earlier
        return
    assert not (tmp_path / "report.json").exists()
    assert file.exists() == earlier
    if earlier:
        assert file.read_text() == "earlier"
    if answer is None:
        assert "Nothing was written. Run it with --yes to write " in said


def test_a_report_names_what_a_reader_needs_to_judge_it(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "_run", lambda *_: ({}, None))
    draft = tmp_path / "secret" / "small"
    draft.mkdir(parents=True)
    text = commands("report", MODEL, "--draft", draft, "--tokens", "9").stdout
    assert "\n- weights: 8 bits, 0.0" in text
    assert f"\n- date: {date.today().isoformat()}\n" in text
    assert "\n- options: --draft small --draft lookup --tokens 9 --passes 5\n" in text
    assert re.search(r"\n- load: \d+\.\d before, \d+\.\d at the end \(.*busy", text)
    assert re.search(r"\n- memory: \d+ GiB\n", text)
    for personal in ("secret", str(Path.home()), str(Path.cwd())):
        assert personal not in text


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ({"quantization": {"bits": 5}, "dtype": "bfloat16"}, "5 bits, "),
        ({"torch_dtype": "float16"}, "float16, "),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16, "),
        ({}, "dtype unknown, "),
    ],
)
def test_weights_are_named_by_bits_or_dtype(
    config: dict[str, Any], weights: str, tmp_path: Path
) -> None:
    folder = copy_of("draft", tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config))
    assert report._weights(str(folder)).startswith(weights)


def test_a_report_that_was_stopped_says_so(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = report._printed

    def printed(words: Any, progress: Any) -> Any:
        if words[0] == "doctor":
            return whole(words, progress)
        raise KeyboardInterrupt  # as Ctrl-C during the second command

    monkeypatch.setattr(report, "_printed", printed)
    done = commands("report", MODEL, "--folder", str(tmp_path), "--yes")
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


def test_progress_is_read_with_and_without_the_time_left() -> None:
    for line in ("measuring: 3/12", "measuring: 3/12, about 40 s left"):
        match = report._PROGRESS.fullmatch(line)
        assert match is not None
        assert match.groups() == ("3", "12")


@pytest.mark.parametrize(("drafted", "busy"), [(0.02, True), (0.05, False)])
def test_costs_of_a_busy_machine_are_named(drafted: float, busy: bool) -> None:
    costs = {"seconds_by_context": {"512": {"0": 0.04, "4": drafted}}}
    assert (report.BUSY in report._calibrate(costs)) == busy
