"""Runs a benchmark: selects the BLAS, prints one table and one line of JSON."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from bench.turns import Spread
from mlx_speculation.blas import use_blas

CACHE = "MLX_SPECULATION_CACHE"
WIDTH = 160  # characters in a line of a table that is written to a file


@dataclass(slots=True)
class Report:
    """The rows of one benchmark."""

    # Measured values; lists and dicts are in the JSON line alone
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # that belong to no row
    quiet: bool = False  # print nothing, as on all ranks but the first

    def add(self, **row: Any) -> None:
        """Add one row to the table."""
        self.rows.append(row)

    def say(self, line: str) -> None:
        """Print progress on standard error."""
        if not self.quiet:
            typer.secho(line, err=True, dim=True)


@contextmanager
def reported(context: typer.Context) -> Iterator[Report]:
    """Choose the BLAS, let the block fill a report, and print it.

    The block does not use costs that earlier runs have saved. `context` is that of a
    command with the options `blas` and `json_file`.
    """
    chosen = use_blas(context.params["blas"])
    report = Report()
    report.say(f"BLAS: {chosen.detail}")
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {CACHE: folder}),
    ):
        yield report
    if not report.quiet:
        _print(report, context, asdict(chosen))


def _print(report: Report, context: typer.Context, blas: dict[str, Any]) -> None:
    from rich.console import Console

    from mlx_speculation.environment import machine, versions

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(table_of(report.rows))
    options = {k: v for k, v in context.params.items() if k != "json_file"}
    line = json.dumps(
        {
            "benchmark": Path(str(context.info_name)).stem,
            "machine": machine(),
            "versions": versions(),
            "blas": blas,
            "arguments": {name: _named(value) for name, value in options.items()},
            **report.facts,
            "results": report.rows,
        },
        default=asdict,  # a Spread
    )
    # A Path or a str: this depends on the version of typer.
    written: Path | str | None = context.params["json_file"]
    if written is not None:
        Path(written).write_text(line + "\n", encoding="utf-8")
    print(line)


def _named(value: Any) -> Any:
    """Return the value of an option; paths are cut to their last part."""
    if isinstance(value, list):
        return [_named(each) for each in value]
    if isinstance(value, Path) or (isinstance(value, str) and os.sep in value):
        return "+".join(Path(part).name for part in str(value).split("+"))
    return value


def table_of(rows: list[dict[str, Any]]) -> Any:
    """Make the table, without lists and dicts."""
    from rich.table import Table

    table = Table(title_justify="left", padding=(0, 1))
    names, shows = dict.fromkeys(name for row in rows for name in row), list[str]()
    for name in names:
        if any(isinstance(row.get(name), list | dict | tuple) for row in rows):
            continue
        shows.append(name)
        words = any(isinstance(row.get(name), str) for row in rows)
        heading = name.replace("_per_second", "/s").replace("_", " ")
        table.add_column(heading, justify="left" if words else "right")
    for row in rows:
        table.add_row(*(shown(row.get(name)) for name in shows))
    return table


def shown(value: Any) -> str:
    """Return the text of a cell: three digits, quartiles in brackets."""
    if value is None:
        return ""
    if isinstance(value, Spread):
        return f"{shown(value.median)} ({shown(value.lower)}..{shown(value.upper)})"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")
    assert not is_dataclass(value)
    return str(value)
