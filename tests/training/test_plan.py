"""A training is fitted into its minutes before anything is written."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_speculation import environment
from mlx_speculation.cli.commands import train as command
from mlx_speculation.cli.console import Screen
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.training.loop import Reports
from mlx_speculation.training.options import TrainOptions
from mlx_speculation.training.output import curves
from mlx_speculation.training.plan import (
    DATA,
    EVALUATION,
    LEAST_DIALOGUES,
    STEPS,
    Rates,
    Schedule,
    data_seconds,
    made_up,
    position_seconds,
    sized,
    step_seconds,
)
from mlx_speculation.training.state import Progress
from mlx_speculation.training.training_run import Run, train
from support.models.chat_folders import chat_folder
from support.short_training import OPTIONS


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("target"))


@given(
    position=st.floats(1e-7, 1.0),
    token=st.floats(1e-5, 1.0),
    more=st.floats(1.0, 64.0),
    minutes=st.floats(0.1, 600),
    rows=st.sampled_from([1, 3, 8]),
    batch=st.sampled_from([1, 2, 12, 64]),
    held_out=st.sampled_from([2, 6, 128]),
)
def test_each_phase_has_its_share_or_the_training_is_refused(
    position: float,
    token: float,
    more: float,
    minutes: float,
    rows: int,
    batch: int,
    held_out: int,
) -> None:
    rates = Rates(position, token, token * min(more, batch), batch)
    options = TrainOptions(rows=rows, batch=batch, held_out=held_out, minutes=minutes)
    seconds = 60 * minutes
    try:
        kept = sized(options, rates, seconds)
    except InvalidRequestError:
        return
    small = replace(options, **kept)
    assert data_seconds(small, rates) <= DATA * seconds
    assert step_seconds(small, rates) <= STEPS * seconds
    for name, value in kept.items():
        assert 1 <= value < getattr(options, name)
    assert small.held_out >= min(LEAST_DIALOGUES, held_out)
    assert not sized(small, rates, seconds)  # options that fit are not reduced
    if data_seconds(options, rates) <= DATA * seconds:
        assert not {"batch", "held_out", "answer_tokens"} & kept.keys()
    texts = [replace(made_up(9, 1), temperature=0.8 * (n % 2)) for n in range(held_out)]
    number = len(Schedule(minutes, 0.0, rates).evaluated(small, texts))
    assert min(LEAST_DIALOGUES, small.held_out) <= number <= small.held_out
    each = position * (small.answer_tokens + small.prompt_tokens)
    assert number <= max(LEAST_DIALOGUES, EVALUATION * seconds / each * 3)


def test_minutes_that_are_named_are_enough() -> None:
    rates = Rates(0.2, 0.01, 0.4, 64)
    options = TrainOptions(minutes=0.5)
    with pytest.raises(
        InvalidRequestError, match=r"--minutes (\d+) or more"
    ) as refused:
        sized(options, rates, 30)
    needed = int(str(refused.value).split("--minutes ")[1].split()[0])
    sized(options, rates, 60 * needed)
    with pytest.raises(InvalidRequestError):
        sized(options, rates, 60 * (needed - 1))


def test_steps_are_timed_from_small_to_large() -> None:
    timed: list[tuple[int, int]] = []

    def run(rows: int, slots: int) -> float:
        timed.append((rows, slots))
        return 0.5 + rows * slots * 1e-3

    assert position_seconds(run, 8, 1024, 100.0) == pytest.approx(1e-3, rel=0.1)
    assert timed == [(1, 128), (1, 512), (1, 1024), (4, 1024), (8, 1024)]
    timed.clear()
    assert position_seconds(run, 8, 1024, 2.0) > 1e-3
    assert timed == [(1, 128)]


def test_no_further_shape_is_timed_once_one_was_compiled_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, timed = [0.0], list[tuple[int, int]]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def run(rows: int, slots: int) -> float:
        timed.append((rows, slots))
        now[0] += 70  # time to compile
        return 0.03

    assert position_seconds(run, 8, 1024, 90.0) == pytest.approx(0.03 / 512)
    assert timed == [(1, 128), (1, 512)]


def test_what_was_spent_is_named_and_counts() -> None:
    rates, options = Rates(1e-4, 1e-3, 1e-2, 64), TrainOptions(minutes=3)
    sized(options, rates, 170, 10)
    with pytest.raises(
        InvalidRequestError, match=r"Of 3.0 minutes 0 s .* after 200 s .* --minutes 4 "
    ):
        sized(options, rates, -20, 200)


def test_too_few_minutes_are_refused_before_the_target_writes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(Run, "_dialogues", lambda *_: written.append(1))
    out = tmp_path / "head"
    options = TrainOptions(minutes=1e-4)
    with pytest.raises(InvalidRequestError, match="not one step fits"):
        train(target, out, options)
    assert not written
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.openblas
def test_a_training_keeps_its_minutes_and_leaves_a_trained_head(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Count only the time of this process.
    monkeypatch.setattr("time.monotonic", time.process_time)
    began = time.monotonic()
    out, said = tmp_path / "head", list[str]()
    options = TrainOptions(minutes=0.15, draft_vocab=128, depths=2, evaluations=2)
    result = train(target, out, options, reports=Reports(say=said.append))
    assert time.monotonic() - began < 60 * 0.15 + 2
    assert result.ended in ("steps", "time", "stale")
    record = result.record
    assert record["steps"]["taken"] > 0
    assert record["best"]["step"] > 0
    assert (out / "model.safetensors").is_file()
    assert any(line.startswith("reduced to fit into 0.15 minutes") for line in said)


@pytest.mark.openblas
def test_a_long_timing_does_not_cut_the_dialogues(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling can take half of the minutes on a GPU."""
    monotonic, passed = time.monotonic, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: monotonic() + passed[0])

    def compiles(phase: str) -> None:
        if phase == "timing dialogues":
            passed[0] += 40

    options = replace(OPTIONS, minutes=1)
    result = train(target, tmp_path / "head", options, reports=Reports(phase=compiles))
    assert result.record["best"]["step"] > 0
    assert result.record["data"]["dialogues"] == OPTIONS.dialogues


@pytest.mark.openblas
def test_rows_that_hold_no_prompt_do_not_shorten_what_is_evaluated(
    target: Path, tmp_path: Path
) -> None:
    options = replace(OPTIONS, slots=8, evaluations=1)
    result = train(target, tmp_path / "head", options)
    assert result.record["best"]["step"] > 0


@pytest.mark.openblas
def test_an_interrupt_before_the_first_evaluation_writes_no_head(
    target: Path, tmp_path: Path
) -> None:
    def stop(progress: Any, loss: float) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "head"
    result = train(target, out, OPTIONS, reports=Reports(step=stop))
    assert result.ended == "interrupt"
    assert not (out / "model.safetensors").exists()
    assert result.record["best"]["step"] == 0
    assert train(target, out, OPTIONS).ended == "steps"
    assert (out / "model.safetensors").is_file()


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(
    target: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    written: list[int] = []
    with pytest.raises(InvalidRequestError, match=r"cannot be written"):
        train(
            target,
            tmp_path / "file" / "head",
            OPTIONS,
            reports=Reports(data=lambda done, whole: written.append(done)),
        )
    assert written == []


def test_a_plot_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no fonts here")

    monkeypatch.setattr(curves, "_draw", fail)
    said: list[str] = []
    curves.draw_curves(Path("training.png"), Progress(), {}, said.append)
    assert said == ["training.png cannot be drawn: RuntimeError: no fonts here"]


def test_a_package_without_metadata_has_an_unknown_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("mlx", "no-such-package-here"))
    assert environment.versions()["no-such-package-here"] == "unknown"


def test_a_line_is_printed_at_least_every_15_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_QUIET", 1.2)
    with command._shown(Screen()) as reports:
        reports.phase("timing a step")
        time.sleep(1.6)
        reports.say("one line")
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert any("timing a step" in line for line in lines)
    assert lines[-1] == "one line"
