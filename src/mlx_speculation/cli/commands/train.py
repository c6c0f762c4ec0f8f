"""`train`: trains a draft for a target."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.load_pair import begin
from mlx_speculation.cli.options import Blas, Json, Model, TrustRemoteCode
from mlx_speculation.option_fields import option
from mlx_speculation.training.options import TrainOptions

_QUIET = 15.0  # maximum seconds without a printed line
_ENDED = {
    "steps": "All steps were taken.",
    "stale": "It ended early: evaluations no longer improved.",
    "data": "The dialogues are written; the same command without --data-only trains on "
    "them.",
    "time": "The time is up; the same command goes on from here.",
    "interrupt": "Interrupted; the same command goes on from here.",
}

if TYPE_CHECKING:
    from mlx_speculation.training.loop import Reports
    from mlx_speculation.training.training_run import TrainingResult


def train(
    model: Model,
    options: TrainOptions,
    out: Path = option(MISSING, "Folder for the draft; new, or of a run to resume."),
    trust_remote_code: TrustRemoteCode = False,
    blas: Blas = "auto",
    json: Json = False,
) -> None:
    """Train a draft for a target, on what the target itself writes.

    The same command resumes a training that was interrupted.
    """
    screen = Screen(json=json)
    options.check()
    here = begin(blas, screen)
    from mlx_speculation.training.training_run import train as run

    with _shown(screen) as reports:
        result = run(
            model, out, options, reports=reports, trust_remote_code=trust_remote_code
        )
    if result.ended != "data":
        screen.table(_table(result))
    screen.say(_ENDED[result.ended])
    if (speeds := result.speeds) is not None:
        screen.say(
            f"{speeds.drafted:.1f} tokens/s with drafts, {speeds.plain:.1f} without, "
            f"{speeds.length:.2f} tokens a round; {speeds.equal} of {speeds.texts} "
            "texts are the same."
        )
    if result.pairing:
        screen.say(result.pairing)
    screen.object(
        command="train",
        model=model,
        out=out,
        ended=result.ended,
        record=result.record,
        pairing=result.pairing,
        **here,
    )


@contextmanager
def _shown(screen: Screen) -> Iterator["Reports"]:
    """Show two bars on a terminal, else a line at least every 15 s."""
    from mlx_speculation.training.loop import Reports

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[more]}"),
        TimeRemainingColumn(),
        console=screen.notes,
        transient=True,
        disable=not screen.notes.is_terminal,
    )
    tasks: dict[str, Any] = {}
    phase, ended = "loading the target", Event()
    started = said = time.monotonic()

    def say(line: str) -> None:
        nonlocal said
        said = time.monotonic()
        screen.say(line)

    def begin(name: str) -> None:
        nonlocal phase
        phase = name

    def update(name: str, done: int, total: int, more: str = "") -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=total, more="")
        bars.update(tasks[name], completed=done, total=total, more=more)
        begin(f"{name}: {done} of {total} {more}".rstrip())

    def beat() -> None:
        while not ended.wait(1.0):
            if time.monotonic() - said >= _QUIET - 1:
                say(f"{time.monotonic() - started:.0f} s: {phase}")

    if not screen.notes.is_terminal:
        Thread(target=beat, daemon=True).start()
    with bars:
        try:
            yield Reports(
                say=say,
                data=lambda done, whole: update("dialogues", done, whole),
                step=lambda progress, loss: update(
                    "steps", progress.step, progress.steps, f"loss {loss:.3f}"
                ),
                evaluated=lambda progress: say(_evaluated(progress)),
                phase=begin,
            )
        finally:
            ended.set()


def _evaluated(progress: Any) -> str:
    newest = progress.history[-1]
    loss = f", loss {progress.losses[-1][1]:.3f}" if progress.losses else ""
    parts = [
        f"{name} {rates['length']:.3f} ({_shares(rates)})"
        for name, rates in newest["acceptance"].items()
    ]
    return f"step {newest['step']}, {newest['seconds']:.0f} s{loss}: {', '.join(parts)}"


def _shares(rates: dict[str, Any]) -> str:
    return " ".join(f"{share:.2f}" for share in rates["positions"])


def _table(result: "TrainingResult") -> Table:
    record = result.record
    kept = next(
        each for each in record["evaluations"] if each["step"] == record["best"]["step"]
    )
    table = Table(
        "text",
        "mean accepted length",
        "by position",
        "lookup",
        title=f"Held-out text, step {record['best']['step']}",
    )
    for name, rates in kept["acceptance"].items():
        lookup = record["lookup"].get(name)
        table.add_row(
            name,
            f"{rates['length']:.2f}",
            _shares(rates),
            "-" if lookup is None else f"{lookup['length']:.2f}",
        )
    return table
