"""Measures how much faster than plain decoding each drafter makes a target.

For each target, the drafters that exist for it (drafter_list.py) continue the same
prompts as plain decoding, held out of the models' training. Texts are checked against
plain decoding first. Then runs are taken by turns, plain decoding among them, and each
turn begins with another arm, so that a machine that slows down slows all of them. What
counts is the ratio to the plain run of the same turn: its median and its quartiles.
Prefill is left out, and so is the first round.

On a busy machine wall time says little. There `--threads 1` counts: then the processor
time of a run is what it would take on an idle machine with one thread, and the ratios
of processor times are the figures to read. With more threads they are not, because
threads of OpenBLAS that wait count too.

A length of 0 is the length by measurement, after `calibrate`.

The last line on standard output is one JSON object with everything.

    python scripts/benchmark_rounds.py
    python scripts/benchmark_rounds.py --target hybrid --drafter mtp --length 4
    python scripts/benchmark_rounds.py --threads 1 --quick
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.demo import demo_models, demo_prompts
from mlx_speculation.errors import SpeculationError

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator

TARGETS = ["dense", "sliding", "hybrid"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure; the names are those of the options."""

    draft: str | None
    drafters: list[str] | None
    lengths: list[int]
    texts: list[str]
    tokens: int
    temperature: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        wall: tokens per second of wall time.
        processor: tokens per second of processor time.
        counted: the tokens that these count.
        emitted: all tokens.
        rounds: all rounds.
    """

    wall: float
    processor: float
    counted: int
    emitted: int
    rounds: int


@dataclass(slots=True)
class Line:
    """One drafter at one length.

    Attributes:
        target: its name.
        drafter: its name.
        length: tokens drafted in a round at most; 0: by measurement.
        wall: speeds over those of the plain runs of the same turns.
        processor: the same of processor time.
        emitted: tokens of all runs.
        rounds: of all runs.
        near_ties: texts that part from plain decoding where rounding decides.
    """

    target: str
    drafter: str
    length: int
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    emitted: int = 0
    rounds: int = 0
    near_ties: int = 0

    def add(self, run: Run, plain: Run) -> None:
        """Take a run and the plain one of the same turn."""
        self.wall.append(run.wall / plain.wall)
        self.processor.append(run.processor / plain.processor)
        self.emitted += run.emitted
        self.rounds += run.rounds

    def as_json(self) -> dict[str, Any]:
        """Return the values of the JSON object."""
        return {
            **asdict(self),
            "wall_median": median(self.wall),
            "processor_median": median(self.processor),
            "tokens_per_round": self.emitted / self.rounds,
        }


@app.command()
def benchmark(
    target: Annotated[
        list[str] | None,
        typer.Option(help="dense, sliding, hybrid, or a folder; by default all three."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Folder of the draft; by default the bundled.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="By default model, mtp, eagle and assistant."),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Draft lengths; by default 0, by measurement."),
    ] = None,
    group: Annotated[str, typer.Option(help="code, prose or edit.")] = "code",
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    prompts: Annotated[int, typer.Option(min=1)] = 3,
    tokens: Annotated[int, typer.Option(min=16, help="Continued by each run.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 3,
    quick: Annotated[bool, typer.Option(help="1 prompt, 32 tokens, once.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of OpenBLAS; by default as many as CPUs.")
    ] = None,
    blas: Annotated[
        BlasName, typer.Option(help="What multiplies float32 on a Linux CPU.")
    ] = "auto",
) -> None:
    """Time drafters by turns with plain decoding, after checking the text."""
    if threads is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    chosen = use_blas(blas)
    _progress(f"BLAS: {chosen.detail}")
    from mlx_speculation.environment import machine, versions

    texts = [text.text for text in demo_prompts() if text.group == group]
    settings = Settings(
        draft,
        drafter,
        length or [0],
        texts[: 1 if quick else prompts],
        min(tokens, 32) if quick else tokens,
        temperature,
        1 if quick else repeats,
    )
    lines = [line for name in target or TARGETS for line in _lines_of(name, settings)]
    _print(lines, f"{group}, temperature {temperature:g}, {settings.tokens} tokens")
    report = {
        "machine": machine(),
        "versions": versions(),
        "blas": asdict(chosen),
        "group": group,
        "temperature": temperature,
        "tokens": settings.tokens,
        "results": [line.as_json() for line in lines],
    }
    print(json.dumps(report))


def _lines_of(target: str, settings: Settings) -> list[Line]:
    """Check and time the drafters of one target."""
    from drafter_list import Bench, sources_of

    from mlx_speculation import Sampling

    name, bundled = Path(target).name, target in TARGETS
    bench = Bench.load(demo_models()[target] if bundled else Path(target))
    draft = Path(settings.draft or demo_models()["draft"])
    # A lookup gains where text repeats itself, which says little of other text.
    usual = settings.drafters or ["model", "mtp", "eagle", "assistant"]
    sources = sources_of(bench, draft, [], target if bundled else None)
    arms: list[tuple[Line, SpeculativeGenerator]] = []
    for source in (source for source in sources if source.name in usual):
        if 0 in settings.lengths:
            _progress(f"{name}: {source.name}, calibrating")
            source.generator.calibrate()
        for length in settings.lengths:
            line = Line(name, source.name, length)
            _progress(f"{name}: {source.name}, k={length or 'measured'}, checking")
            for text in settings.texts:
                sampling = Sampling(temperature=settings.temperature)
                _, parted = bench.checked_run(
                    source, text, settings.tokens, sampling, length or None
                )
                line.near_ties += parted
            arms.append((line, source.generator))
    _take_turns(arms, bench.plain, settings)
    return [line for line, _ in arms]


def _take_turns(
    arms: "list[tuple[Line, SpeculativeGenerator]]",
    plain: "SpeculativeGenerator",
    settings: Settings,
) -> None:
    """Run all arms and plain decoding, prompt by prompt."""
    turn = 0
    for _ in range(settings.repeats):
        for text in settings.texts:
            _progress(f"turn {turn + 1} of {settings.repeats * len(settings.texts)}")
            beside = _timed(plain, 0, text, settings)
            first = turn % max(1, len(arms))
            for line, generator in arms[first:] + arms[:first]:
                line.add(_timed(generator, line.length, text, settings), beside)
            turn += 1


def _timed(
    generator: "SpeculativeGenerator", length: int, text: str, settings: Settings
) -> Run:
    """Continue a prompt; the clocks start when the first round has ended."""
    from mlx_speculation import Sampling

    stream = generator.stream(
        text,
        max_tokens=settings.tokens,
        stop_tokens=(),
        sampling=Sampling(temperature=settings.temperature),
        draft_length=length or None,
    )
    chunks = iter(stream)
    next(chunks)
    first, counted = stream.stats.rounds, 0
    wall, processor = time.perf_counter(), time.process_time()
    for _ in chunks:
        counted += stream.stats.rounds != first
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    counts = stream.stats
    return Run(
        counted / wall, counted / processor, counted, counts.emitted, counts.rounds
    )


def _spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _print(lines: list[Line], title: str) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Speed over plain decoding: {title}", title_justify="left")
    for column in ("target", "drafter", "k"):
        table.add_column(column)
    for column in ("wall time", "processor time", "tokens a round"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.target,
            line.drafter,
            str(line.length or "measured"),
            _spread(line.wall),
            _spread(line.processor),
            f"{line.emitted / line.rounds:.2f}",
        )
    Console(highlight=False, width=100).print(table)


def _progress(line: str) -> None:
    typer.secho(line, err=True, dim=True)


def main() -> None:
    """Run; errors of the package become one line and status 1."""
    try:
        app()
    except SpeculationError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        sys.exit(1)


if __name__ == "__main__":
    main()
