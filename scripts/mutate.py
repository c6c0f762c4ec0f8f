"""Breaks the code on purpose, one place at a time, and counts what the tests notice.

A mutant is the package with one operator, number, condition or loop changed by
cosmic-ray. Those that change nothing at run time (annotations, docstrings) are left
out, then a sample is drawn with a seed. A mutant is killed when a test fails, or times
out, and survives when all tests pass that run the changed statement.

    pip install '.[mutation]'
    python scripts/mutate.py make mutants --folder caches --sample 400
    python scripts/mutate.py cover mutants --jobs 2
    python scripts/mutate.py run mutants --jobs 2
    python scripts/mutate.py report mutants

`make` writes the mutated files; it alone needs cosmic-ray. `cover` runs the tests once
and writes which of them run which lines; it alone needs coverage. `run` needs no more
than the tests do, so that it can be run on another machine. It goes on where an earlier
run was cut off: delete results.jsonl to begin anew. The last line on standard output of
each command is one JSON object.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from mutation.choosing import read_cover
from mutation.cover import test_files, write_cover
from mutation.judging import Judge
from mutation.making import write_mutants
from mutation.mutant import read_facts, read_mutants
from mutation.processes import say
from mutation.results import Results, report

SEED = 20261121

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Folder = Annotated[Path, typer.Argument(help="What `make` wrote.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes at a time.")]
Tests = Annotated[
    list[str] | None, typer.Option(help="By default those of the mutated folder.")
]


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="Where the mutants are written.")],
    of: Annotated[str, typer.Option("--folder", help="What is mutated.")] = "caches",
    file: Annotated[
        str | None, typer.Option(help="The one file of the folder that is mutated.")
    ] = None,
    sample: Annotated[int, typer.Option(min=1)] = 400,
    seed: Annotated[int, typer.Option()] = SEED,
) -> None:
    """Write a sample of mutants as JSON files."""
    print(json.dumps(write_mutants(folder, of, sample, seed, file)))


@app.command()
def cover(folder: Folder, jobs: Jobs = 2, tests: Tests = None) -> None:
    """Write which tests run which lines."""
    of = read_facts(folder)["of"]
    print(json.dumps(write_cover(folder, of, tests or [f"tests/{of}"], jobs)))


@app.command()
def run(
    folder: Folder,
    jobs: Jobs = 2,
    tests: Tests = None,
    grace: Annotated[
        float, typer.Option(help="Seconds allowed beside three times the tests' own.")
    ] = 30,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which the run ends, to be resumed.")
    ] = 1e6,
) -> None:
    """Run the tests on every mutant that has no result yet."""
    facts = read_facts(folder)
    known = read_cover(folder, facts["of"])
    if known is None:
        say("no cover.json: every mutant runs all tests")
    elif tests:
        raise typer.BadParameter("--tests is for `cover` where there is a cover.json.")
    results, mutants = Results(folder), read_mutants(folder)
    files = test_files(tests or [f"tests/{facts['of']}"])
    judge = Judge(
        results, known, of=facts["of"], tests=files, grace=grace, deadline=deadline
    )
    judge.judge(mutants, jobs)
    print(json.dumps(report(facts, mutants, results)))


@app.command("report")
def report_(folder: Folder) -> None:
    """Print what was found so far."""
    facts = read_facts(folder)
    print(json.dumps(report(facts, read_mutants(folder), Results(folder))))


if __name__ == "__main__":
    app()
