"""`report`: the figures of all commands, without anything personal."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import typer

from mlx_speculation import demo_models
from mlx_speculation.cli.commands import report, report_page
from mlx_speculation.cli.load_pair import short_name
from mlx_speculation.cli.run_app import FAILED, INTERRUPTED, TERMINATED, USAGE
from mlx_speculation.models.quantize import runs_on_linux_cpu
from support.models.demo_folders import copy_of
from support.processes.commands import Commands

MODEL = str(demo_models()["draft"])
OPTIONS = ["--draft", "lookup", "--tokens", "8", "--passes", "1", "--yes"]


def _unseen(line: str) -> None:
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
    assert set(page) == {*report_page.FACTS, "machine", "versions", *report.SHARED}


@pytest.mark.slow
def test_a_command_that_fails_leaves_its_error_without_the_path(tmp_path: Path) -> None:
    model = str(tmp_path / "private" / "empty")
    Path(model).mkdir(parents=True)
    measured = report._stage("check", ["check", model], _unseen)
    assert list(measured) == ["error"]
    assert measured["error"].startswith("The folder 'empty' lacks config.json")
    assert "private" not in measured["error"]
    page = {
        "model": "empty",
        "machine": {"device_name": "M9", "cpu": ""},
        "versions": {},
    }
    text = report_page.markdown({**page, "check": measured})
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
    text = report_page.markdown(
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
@pytest.mark.parametrize(("yes", "answer"), [(True, ""), (False, "y"), (False, "n")])
def test_a_report_is_written_only_after_a_yes(
    *,
    earlier: bool,
    yes: bool,
    answer: str,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Standard output has the page alone; the question is on standard error."""
    monkeypatch.setattr(report, "_run", lambda *_: ({}, None))
    monkeypatch.setattr(os, "isatty", lambda _: not yes)
    file = tmp_path / "report.md"
    if earlier:
        file.write_text("earlier")
    words = ["report", MODEL, "--folder", str(tmp_path), *(["--yes"] * yes)]
    done = commands(*words, text=f"{answer}\n")
    assert done.exit_code == 0
    page, said = done.stdout, " ".join(done.stderr.split())
    assert page.startswith("# mlx-speculation on ")
    assert page.count("\n") == len(page.splitlines())
    assert (f"This replaces the earlier {file}." in said) == earlier
    assert (f"Write this to {file} and " in said) == (not yes)
    if yes or answer == "y":
        assert file.read_text() == page
        assert (tmp_path / "report.json").is_file()
        return
    assert "Nothing was written." in said
    assert not (tmp_path / "report.json").exists()
    assert file.exists() == earlier
    if earlier:
        assert file.read_text() == "earlier"


@pytest.mark.parametrize("closed", [False, True])
def test_without_a_terminal_nothing_runs_unless_yes_is_given(
    closed: bool, tmp_path: Path
) -> None:
    file = "<&-" if closed else "</dev/null"
    command = f"exec '{sys.executable}' -m mlx_speculation report '{MODEL}' 0{file}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == USAGE
    assert done.stdout == ""
    assert done.stderr.startswith("error: Standard input is no terminal")
    assert "--yes" in done.stderr
    assert done.stderr.count("\n") == 1


STOPPED: tuple[dict[str, Any], str | None] = ({}, "check")
BROKEN: tuple[dict[str, Any], str | None] = ({"check": {"error": "no"}}, None)


@pytest.mark.parametrize("name", ["report.md", "report.json"])
@pytest.mark.parametrize("run", [STOPPED, BROKEN])
def test_a_partial_report_replaces_no_file(
    run: Any, name: str, commands: Commands, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "_run", lambda *_: run)
    earlier = tmp_path / name
    earlier.write_text("whole")
    words = ["report", MODEL, "--folder", str(tmp_path), "--yes"]
    done = commands(*words)
    assert done.exit_code == (INTERRUPTED if run is STOPPED else FAILED)
    assert [*tmp_path.iterdir()] == [earlier]
    assert earlier.read_text() == "whole"
    lines = done.stderr.splitlines()
    assert lines[-1] == "Nothing was written: a partial report replaces no files."
    assert ("error: check: no" in lines) == (run is BROKEN)
    earlier.unlink()
    commands(*words)
    assert {each.name for each in tmp_path.iterdir()} == {"report.md", "report.json"}


@pytest.mark.parametrize("run", [STOPPED, BROKEN])
@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_partial_report_replaces_files_after_a_yes(
    run: Any, answer: str, commands: Commands, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "_run", lambda *_: run)
    monkeypatch.setattr(os, "isatty", lambda _: True)
    earlier = tmp_path / "report.md"
    earlier.write_text("whole")
    done = commands("report", MODEL, "--folder", tmp_path, text=f"{answer}\n")
    assert done.exit_code == (INTERRUPTED if run is STOPPED else FAILED)
    assert (earlier.read_text() == "whole") == (answer == "n")
    assert ("Nothing was written." in done.stderr) == (answer == "n")


def interrupted(number: int) -> Any:
    def wait(*_: Any) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(5)
        raise AssertionError("no signal")

    return wait


def test_ctrl_c_ends_the_question_and_writes_nothing(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first one has stopped a stage, and the second one is handled as the first."""
    monkeypatch.setattr(report, "_printed", interrupted(signal.SIGINT))
    monkeypatch.setattr(os, "isatty", lambda _: True)
    questions: list[str] = []

    def confirm(question: str) -> bool:
        questions.append(question)
        try:
            return bool(interrupted(signal.SIGINT)())
        except KeyboardInterrupt:
            raise typer.Abort from None  # as typer does

    monkeypatch.setattr("typer.confirm", confirm)
    done = commands("report", MODEL, "--folder", tmp_path, text="")
    assert done.exit_code == INTERRUPTED
    assert len(questions) == 1
    assert "Nothing was written." in done.stderr
    assert "Aborted" not in done.stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("yes", [False, True])
def test_after_sigterm_nothing_is_asked_and_no_file_replaced(
    yes: bool, commands: Commands, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "_printed", interrupted(signal.SIGTERM))
    monkeypatch.setattr(os, "isatty", lambda _: True)
    earlier = tmp_path / "report.md"
    earlier.write_text("whole")
    words = ["report", MODEL, "--folder", tmp_path, *(["--yes"] * yes)]
    done = commands(*words, text="y\n")
    assert done.exit_code == TERMINATED
    assert "?" not in done.stderr
    assert "Nothing was written" in done.stderr
    assert [*tmp_path.iterdir()] == [earlier]
    assert earlier.read_text() == "whole"


@pytest.mark.parametrize("stage", ["check", "exact", "benchmark"])
def test_the_status_is_1_if_texts_or_bits_differ(
    stage: str, commands: Commands, monkeypatch: Any, tmp_path: Path
) -> None:
    result: Any = {stage: {"same": False}}
    monkeypatch.setattr(report, "_run", lambda *_: (result, None))
    monkeypatch.setattr(report, "markdown", lambda _: "the page\n")
    earlier = tmp_path / "report.md"
    earlier.write_text("earlier")  # such a report is whole
    done = commands("report", MODEL, "--folder", tmp_path, "--yes")
    assert done.exit_code == FAILED
    assert earlier.read_text() == "the page\n"


@pytest.mark.parametrize("draft", ["lokup", "secret/no head/x", "none"])
def test_a_wrong_draft_is_refused_before_anything_runs(
    draft: str, commands: Commands, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "_run", None)
    words = ["--draft", draft, "--folder", tmp_path, "--yes"]
    assert repr(draft) in commands.refused("report", MODEL, *words)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["report.md", "report.json"])
def test_a_folder_in_the_place_of_a_file_is_named(
    name: str, commands: Commands, tmp_path: Path
) -> None:
    place = tmp_path / name
    place.mkdir()
    said = commands.refused("report", MODEL, "--folder", tmp_path, "--yes")
    assert said.startswith(f"--folder is {str(tmp_path)!r}, and its file is ")
    assert said.endswith(f"{str(place)!r}, which is a folder. Name another folder.")


@pytest.mark.parametrize("draft", ["../my models/draft", "./my models/draft/", "my/q"])
def test_texts_of_commands_have_no_folders(
    draft: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = tmp_path / "some one" / "work"
    (here / draft).mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "some one"))
    monkeypatch.setenv("MLX_SPECULATION_CACHE", str(tmp_path / "my caches" / "costs"))
    name = Path(draft).name
    whole = str((here / draft).resolve())
    for given, left in {
        f"Best here: --draft {draft}; x plain": f"Best here: --draft {name}; x plain",
        f"No file {whole}/a.safetensors.": f"No file {name}/a.safetensors.",
        f"There is no folder {whole!r}.": f"There is no folder {name!r}.",
        f"kept in {tmp_path}/my caches/costs, so": "kept in costs, so",
        "loads ~/models/x, ../models/y or (./z)": "loads x, y or (z)",
        f"of {here}/.venv/lib/libmlx.so": "of libmlx.so",
        f"in {tmp_path}/some one": "in ~",
        "org/model at 3.5 tokens/s, 1/2 of a step": None,
        "see https://example.org/a/b and docs/log/x.md": None,
    }.items():
        words = ["benchmark", "org/model", "--draft", draft]
        assert report._without_paths(given, words) == (given if left is None else left)


def test_advice_has_no_folders_if_a_draft_is_quoted() -> None:
    draft = "/Users/Ann's models/draft"
    text = json.dumps({"advice": f"Best here: --draft {shlex.quote(draft)}; x"})
    left = json.loads(report._without_paths(text, ["benchmark", "--draft", draft]))
    assert left == {"advice": "Best here: --draft 'draft'; x"}


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("org/model-8B", "org/model-8B"),
        ("lookup", "lookup"),
        ("../my models/draft", "draft"),
        ("secret/models/draft", "draft"),
        ("/secret/draft", "draft"),
        ("~/draft", "draft"),
    ],
)
def test_a_folder_is_named_without_its_path(typed: str, shown: str) -> None:
    assert short_name(typed) == shown


def test_a_report_names_what_a_reader_needs_to_judge_it(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "_run", lambda *_: ({}, None))
    draft = tmp_path / "secret" / "small"
    shutil.copytree(MODEL, draft)
    words = ["--draft", draft, "--tokens", "9", "--folder", tmp_path, "--yes"]
    text = commands("report", MODEL, *words).stdout
    assert "\n- weights: 8 bits, 0.0" in text
    assert f"\n- date: {date.today().isoformat()}\n" in text
    assert "\n- options: --draft small --draft lookup --tokens 9 --passes 5\n" in text
    assert re.search(
        r"\n- load: \d+\.\d programs wanted a core .* before the run ", text
    )
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
    named = report._weights(str(folder))
    assert named.startswith(weights)
    assert named.endswith("computed in float32") == runs_on_linux_cpu()


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
    seen: list[str] = []
    model = str(demo_models()["draft"])
    words = ["check", model, "--exact", "8", "--context", "16"]
    measured = report._stage("exact", words, seen.append)
    assert measured["same"] is True
    counts = [line.partition(",")[0] for line in seen]
    assert counts == [
        f"checking exact mode: {done}/{len(seen)}" for done in range(1, len(seen) + 1)
    ]


def test_progress_is_read_with_and_without_the_time_left() -> None:
    for line in ("measuring: 3/12", "measuring: 3/12, about 40 s left"):
        assert report._PROGRESS.fullmatch(line)
    assert not report._PROGRESS.fullmatch("BLAS: OpenBLAS 0.3/4 cores")


def test_progress_of_a_command_is_handed_on(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = "measuring: 3/12, about 5 minutes left"

    def printed(_: Any, show: Any) -> Any:
        show(line)
        return [], 1, ""

    monkeypatch.setattr(report, "_printed", printed)
    done = commands("report", MODEL, "--folder", tmp_path, "--yes")
    assert done.stderr.count(f"{line}\n") == len(report.SHARED)
    for name in report.SHARED:
        assert f"error: {name}: ended with status 1\n" in done.stderr


def test_texts_are_counted_and_not_passes() -> None:
    measured = {"plain": "no draft", "same": True, "passes": 5, "texts": 3}
    more = {"tokens": 8, "chat": False, "arms": [], "advice": ""}
    assert report_page._benchmark(measured | more)[0].startswith(
        "3 texts, answers of up to 8 tokens; their texts are equal to"
    )


@pytest.mark.parametrize(("drafted", "busy"), [(0.02, True), (0.05, False)])
def test_costs_of_a_busy_machine_are_named(drafted: float, busy: bool) -> None:
    costs = {"seconds_by_context": {"512": {"0": 0.04, "4": drafted}}}
    assert (report_page.BUSY in report_page._calibrate(costs)) == busy
