"""`train`: trains a draft for a target."""

import time
from collections.abc import Callable, Iterator
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
from mlx_speculation.environment import versions
from mlx_speculation.option_fields import option
from mlx_speculation.training.options import TrainOptions

_QUIET = 15.0  # the most seconds without a printed line

if TYPE_CHECKING:
    from mlx_speculation.training.loop import Reports
    from mlx_speculation.training.reports import TrainingResult


def train(
    model: Model,
    options: TrainOptions,
    out: Path = option(MISSING, "Folder for the draft; made, or resumed."),
    trust_remote_code: TrustRemoteCode = False,
    blas: Blas = "auto",
    json: Json = False,
) -> None:
    """Train a draft for a target, on what the target itself writes.

    The same command resumes a training that was interrupted.
    """
    screen = Screen(json=json)
    options.check()
    chosen = begin(blas, screen)
    from mlx_speculation.training.training_run import train as run

    with _shown(screen) as reports:
        result = run(
            model, out, options, reports=reports, trust_remote_code=trust_remote_code
        )
    if result.ended != "data":
        screen.table(_table(result))
    for line in _closing(result):
        screen.say(line)
    screen.object(
        command="train",
        model=model,
        out=out,
        ended=result.ended,
        record=result.record,
        pairing=result.pairing,
        blas=chosen,
        versions=versions(),
    )


@contextmanager
def _shown(screen: Screen) -> Iterator["Reports"]:
    """Show two bars on a terminal; in other outputs a line at least every 15 s."""
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
    with bars, _Heartbeat(screen) as beat:
        tasks: dict[str, Any] = {}

        def update(name: str, done: int, total: int, more: str = "") -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total, more="")
            bars.update(tasks[name], completed=done, total=total, more=more)

        def wrote(done: int, whole: int) -> None:
            update("dialogues", done, whole)
            beat.phase = f"the target writes dialogues: {done} of {whole}"

        def stepped(progress: Any, loss: float) -> None:
            update("steps", progress.step, progress.steps, f"loss {loss:.3f}")
            beat.phase = f"step {progress.step} of {progress.steps}, loss {loss:.3f}"

        yield Reports(
            say=beat.say,
            data=wrote,
            step=stepped,
            evaluated=_line(beat.say),
            phase=beat.begin,
        )


class _Heartbeat:
    """Prints the current phase if no line was printed for 15 seconds.

    On a terminal the bars show progress, so it prints nothing.

    Attributes:
        phase: the current phase.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.phase = "loading the target"
        self._started = self._said = time.monotonic()
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def say(self, line: str) -> None:
        """Print a line."""
        self._said = time.monotonic()
        self._screen.say(line)

    def begin(self, phase: str) -> None:
        """Set the current phase."""
        self.phase = phase

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            now = time.monotonic()
            if now - self._said >= _QUIET - 1:
                self.say(f"{now - self._started:.0f} s: {self.phase}")

    def __enter__(self) -> "_Heartbeat":
        if not self._screen.notes.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()


def _line(say: Callable[[str], None]) -> Callable[[Any], None]:
    def evaluated(progress: Any) -> None:
        newest = progress.history[-1]
        loss = f", loss {progress.losses[-1][1]:.3f}" if progress.losses else ""
        parts = [
            f"{name} {rates['length']:.3f} ("
            + " ".join(f"{share:.2f}" for share in rates["positions"])
            + ")"
            for name, rates in newest["acceptance"].items()
        ]
        say(
            f"step {newest['step']}, {newest['seconds']:.0f} s{loss}: "
            f"{', '.join(parts)}"
        )

    return evaluated


def _table(result: "TrainingResult") -> Table:
    """Return a table of the acceptance on held-out text."""
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
            " ".join(f"{share:.2f}" for share in rates["positions"]),
            "-" if lookup is None else f"{lookup['length']:.2f}",
        )
    return table


def _closing(result: "TrainingResult") -> Iterator[str]:
    why = {
        "steps": "All steps were taken.",
        "stale": "It ended early: evaluations no longer gained.",
        "data": "The dialogues are written; the same command without --data-only "
        "trains on them.",
        "time": "The time is up; the same command goes on from here.",
        "interrupt": "Interrupted; the same command goes on from here.",
    }
    yield why[result.ended]
    if result.speeds is not None:
        yield (
            f"{result.speeds.drafted:.1f} tokens/s with it and "
            f"{result.speeds.plain:.1f} without, "
            f"{result.speeds.length:.2f} tokens a round; "
            f"{result.speeds.equal} of {result.speeds.texts} texts are the same."
        )
    if result.pairing:
        yield result.pairing
