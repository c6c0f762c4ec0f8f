"""Measures how often drafts are right: acceptance by position, for every drafter.

For each target, each drafter that exists for it and each draft length the prompts of
compare.py (held out of the models' training) are continued, and the text is checked
against plain decoding first. No time is measured, so a busy machine changes nothing.
Drafters are the bundled draft model, the MTP head in the target's folder, the heads
bundled for the target (drafter_list.py), a lookup, and a cascade of a lookup with long
matches and the draft model.

Rates by position are over all drafts: position i counts where i tokens or more were
accepted. A draft shorter than that counts as one that was wrong there, and a head that
is good for fewer tokens drafts fewer. Length is 1 + accepted / drafts, with the bonus;
tokens a round counts rounds without a draft too.

The last line on standard output is one JSON object with everything.

    python scripts/benchmark_drafters.py
    python scripts/benchmark_drafters.py --quick
    python scripts/benchmark_drafters.py --target hybrid --group code --length 4
    python scripts/benchmark_drafters.py --target path --draft path --head path
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from benchmark_options import (
    GROUPS,
    TARGETS,
    TEMPERATURES,
    Blas,
    DraftModel,
    Group,
    Head,
    Seed,
    Target,
    Temperature,
    folder_of,
    progress,
    texts_of,
)

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from drafter_list import Bench, Source

    from mlx_speculation.engine import Statistics

LENGTHS = list(range(1, 9))

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmark(
    target: Target = None,
    draft: DraftModel = None,
    head: Head = None,
    group: Group = None,
    temperature: Temperature = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Draft lengths; by default 1 to 8.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of each group.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Continued by each run.")] = 128,
    quick: Annotated[
        bool,
        typer.Option(help="1 prompt a group, 48 tokens, temperature 0, lengths 1 4 8."),
    ] = False,
    seed: Seed = 0,
    blas: Blas = "auto",
) -> None:
    """Count accepted tokens by position, after checking the text."""
    chosen = use_blas(blas)
    progress(f"BLAS: {chosen.detail}")
    settings = Settings(
        target or TARGETS,
        draft,
        head or [],
        group or GROUPS,
        temperature or ([0.0] if quick else TEMPERATURES),
        length or ([1, 4, 8] if quick else LENGTHS),
        1 if quick else prompts,
        min(tokens, 48) if quick else tokens,
        seed,
    )
    print(json.dumps({**_report(settings), "blas": asdict(chosen)}))


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure; the names are those of the options."""

    targets: list[str]
    draft: str | None
    heads: list[str]
    groups: list[str]
    temperatures: list[float]
    lengths: list[int]
    prompts: int
    tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Line:
    """One drafter at one length, on one group of prompts.

    Attributes:
        target: its name.
        drafter: its name.
        group: that of the prompts.
        temperature: of the sampling.
        length: tokens drafted in a round at most.
        statistics: of all prompts together.
        near_ties: texts that part from plain decoding where rounding decides.
    """

    target: str
    drafter: str
    group: str
    temperature: float
    length: int
    statistics: "Statistics"
    near_ties: int

    def as_json(self) -> dict[str, Any]:
        """Return the values of the JSON object."""
        counts = self.statistics
        return {
            "target": self.target,
            "drafter": self.drafter,
            "group": self.group,
            "temperature": self.temperature,
            "length": self.length,
            "rounds": counts.rounds,
            "drafts": counts.drafts,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "emitted": counts.emitted,
            "reached": counts.reached,
            "by_position": list(counts.accepted_per_position),
            "acceptance_rate": counts.acceptance_rate,
            "mean_accepted_length": counts.mean_accepted_length,
            "tokens_per_round": counts.tokens_per_round,
            "near_ties": self.near_ties,
        }


def _report(settings: Settings) -> dict[str, Any]:
    """Run everything, print the table and return the JSON values."""
    from mlx_speculation.environment import machine, versions

    lines: list[Line] = []
    for target in settings.targets:
        lines += _lines_of(target, settings)
    _print(lines, max(settings.lengths))
    return {
        "machine": machine(),
        "versions": versions(),
        "prompts": settings.prompts,
        "tokens": settings.tokens,
        "seed": settings.seed,
        "results": [line.as_json() for line in lines],
    }


def _lines_of(target: str, settings: Settings) -> Iterator[Line]:
    """Run every drafter of one target."""
    from drafter_list import Bench, sources_of

    name, bundled = Path(target).name, target in TARGETS
    folder, draft = folder_of(target), folder_of(settings.draft or "draft")
    heads = [Path(head) for head in settings.heads]
    bench = Bench.load(folder)
    sources = sources_of(bench, draft, heads, target if bundled else None)
    progress(f"{name}: {', '.join(source.name for source in sources)}")
    cases = product(sources, settings.groups, settings.temperatures, settings.lengths)
    for source, group, temperature, length in cases:
        progress(f"{name}: {source.name}, {group}, {temperature:g}, k={length}")
        statistics, ties = _run(bench, source, group, temperature, length, settings)
        yield Line(name, source.name, group, temperature, length, statistics, ties)


def _run(
    bench: "Bench",
    source: "Source",
    group: str,
    temperature: float,
    length: int,
    settings: Settings,
) -> "tuple[Statistics, int]":
    """Continue a group's prompts; return the counts, and how many texts part."""
    from drafter_list import added

    from mlx_speculation import Sampling
    from mlx_speculation.engine import Statistics

    total, ties = Statistics(), 0
    for index, text in enumerate(texts_of(group, settings.prompts)):
        sampling = Sampling(temperature=temperature, seed=settings.seed + index)
        counts, parted = bench.checked_run(
            source, text.text, settings.tokens, sampling, length
        )
        total, ties = added(total, counts), ties + parted
    return total, ties


def _print(lines: list[Line], longest: int) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="Accepted by position, % of all drafts", title_justify="left", padding=0
    )
    for column in ("target", "drafter", "text", "T"):
        table.add_column(column + " ", no_wrap=True)
    for column in ("k", *map(str, range(1, longest + 1))):
        table.add_column(f" {column}", justify="right", no_wrap=True)
    for column in ("rate", "length", "a round", "drafts"):
        table.add_column(f" {column}", justify="right", no_wrap=True)
    for line in lines:
        counts = line.statistics
        rates = [f" {100 * rate:.0f}" for rate in counts.accepted_per_position]
        table.add_row(
            f"{line.target} ",
            f"{line.drafter} ",
            f"{line.group} ",
            f"{line.temperature:g}",
            f" {line.length}",
            *(rates + [""] * longest)[:longest],
            f" {100 * counts.acceptance_rate:.0f}%",
            f" {counts.mean_accepted_length:.2f}",
            f" {counts.tokens_per_round:.2f}",
            f" {counts.drafts}",
        )
    Console(highlight=False, width=110).print(table)


if __name__ == "__main__":
    run(app)
