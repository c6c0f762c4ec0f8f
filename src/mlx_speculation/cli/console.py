"""Console of commands: results on stdout, as text or JSON; other lines on stderr."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

WIDEST = 500  # characters in a line of a table
QUIET_SECONDS = 15.0  # between lines of progress if stderr is no terminal
Report = Callable[[int, int], None]


class Screen:
    """Output of a command.

    With `json` standard output gets one JSON object instead of text and tables.
    `quiet` silences `say`, progress, and tables on standard error.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json, self.quiet = json, quiet
        self.notes = Console(stderr=True)
        self.out = Console()
        self._in_line = False

    def say(self, line: str) -> None:
        """Print a dim line on standard error."""
        if self.quiet:
            return
        self.notes.print(line, style="dim", highlight=False, markup=False)

    def text(self, text: str) -> None:
        """Print a piece of text on standard output."""
        if not self.json:
            typer.echo(text, nl=False)
            if text:
                self._in_line = not text.endswith("\n")

    @contextmanager
    def text_line(self) -> Iterator[None]:
        """Print a newline after the pieces of a text, and then the warnings."""
        if self.json:
            yield
            return
        self._in_line = False
        with deferred_warnings():
            try:
                yield
            except BaseException:
                if self._in_line:
                    self.text("\n")
                raise
            self.text("\n")

    def table(self, table: Table, *, result: bool = True) -> None:
        """Print a table uncut, on standard output if it is a `result`."""
        if self.json or (self.quiet and not result):
            return
        console = self.out if result else self.notes
        least = least_width(table, console)
        if least > console.width:
            table.width = least
        console.print(table, crop=False)

    def object(self, **fields: Any) -> None:
        """Print the fields as a JSON object, if `json` is set."""
        if self.json:
            typer.echo(json.dumps(plain(fields), allow_nan=False))

    @contextmanager
    def progress(self, what: str) -> Iterator[Report]:
        """Show progress; yield a function that takes the number done and the total."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            console=self.notes,
            transient=True,
            disable=self.quiet or not self.notes.is_terminal,
        )
        with bar:
            task = bar.add_task(what, total=None, count="")
            said = time.monotonic()
            first = said, 0, 0

            def report(done: int, total: int) -> None:
                nonlocal said, first
                now, count = time.monotonic(), f"{done}/{total}"
                if total != first[2] or done <= first[1]:  # a phase begins
                    first = now, done, total
                elif done < total:
                    rate = (now - first[0]) / (done - first[1])
                    count += f", about {_duration(rate * (total - done))} left"
                bar.update(task, completed=done, total=total, count=count)
                if self.notes.is_terminal:
                    return
                if now - said >= QUIET_SECONDS:
                    said = now
                    self.say(f"{what}: {count}")

            yield report


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds <= 120 else f"{seconds / 60:.0f} minutes"


@contextmanager
def deferred_warnings() -> Iterator[None]:
    """Hold back the warnings that the block issues, and show them at its end."""
    show, deferred = warnings.showwarning, []

    def defer(*values: Any, **options: Any) -> None:
        deferred.append((values, options))

    warnings.showwarning = defer
    try:
        yield
    finally:
        warnings.showwarning = show
        for values, options in deferred:
            show(*values, **options)


def least_width(table: Table, console: Console) -> int:
    """Let a table wrap long words; return its minimum width."""
    for column in table.columns:
        column.overflow = "fold"
        if column.no_wrap:
            cells = [str(cell) for cell in (column.header, *column.cells)]
            column.min_width = max(map(cell_len, cells))
    return Measurement.get(console, console.options.update(width=WIDEST), table).minimum


def plain(value: Any) -> Any:
    """Return a value in types of JSON: paths become strings, infinite numbers None."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def number(value: float) -> str:
    """Return a number with two decimals."""
    return f"{value:.2f}"


def percent(value: float) -> str:
    """Return a share as a whole percentage."""
    return f"{value:.0%}"
