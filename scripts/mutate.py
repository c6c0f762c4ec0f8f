"""Breaks the code on purpose, one place at a time, and counts what the tests notice.

A mutant is the package with one operator, number, condition or loop changed by
cosmic-ray. Those that change nothing at run time (annotations, docstrings) are left
out, then a sample is drawn with a seed. A mutant is killed when its folder's tests
fail or run into the time limit, and survives when they pass.

    pip install '.[mutation]'
    python scripts/mutate.py make mutants --folder caches --sample 400
    python scripts/mutate.py run mutants --jobs 2

`make` writes the mutated files; `run` needs no more than the tests do, so that it can
be run on another machine. Each worker has a copy of the project of its own. The last
line on standard output is one JSON object: counts, and the diff of each survivor.
"""

import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
SEED = 20261121
LEFT_OUT = frozenset({"__init__.py"})
# They look at much in little time, so they come right after the nearest.
QUICK = frozenset({"test_speculation", "test_rarer_kinds", "test_rotating"})
WITHOUT = shutil.ignore_patterns(".*", "demo", "__pycache__", "mutants", "*.egg-info")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed file.

    Attributes:
        path: of the file, from the project's root.
        operator: cosmic-ray's name of the change.
        occurrence: which place in the file, counted for this operator.
        source: the whole file, changed.
    """

    path: str
    operator: str
    occurrence: int
    source: str

    @property
    def diff(self) -> str:
        """The change, as a unified diff without context."""
        before = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        lines = difflib.unified_diff(
            before, self.source.splitlines(), self.path, self.path, lineterm="", n=0
        )
        return "\n".join(lines)


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="Where the mutants are written.")],
    of: Annotated[str, typer.Option("--folder", help="What is mutated.")] = "caches",
    sample: Annotated[int, typer.Option(min=1)] = 400,
    seed: Annotated[int, typer.Option()] = SEED,
) -> None:
    """Write a sample of mutants as JSON files."""
    from cosmic_ray.commands.init import _all_work_items

    paths = [p for p in sorted((ROOT / of).glob("*.py")) if p.name not in LEFT_OUT]
    specs = [item.mutations[0] for item in _all_work_items(paths, {})]
    random.Random(seed).shuffle(specs)
    chosen = list(islice(_mutants(paths, specs), sample))
    folder.mkdir(parents=True)
    for index, mutant in enumerate(chosen):
        text = json.dumps(asdict(mutant))
        (folder / f"{index:04}.json").write_text(text, encoding="utf-8")
    facts = {"of": of, "seed": seed, "places": len(specs), "sampled": len(chosen)}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    print(json.dumps(facts))


def _mutants(paths: list[Path], specs: list[Any]) -> Iterator[Mutant]:
    """Yield every mutant that runs, and runs other code than its file."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    sources = {str(path): path.read_text(encoding="utf-8") for path in paths}
    known = {_behaviour(source) for source in sources.values()}
    for spec in specs:
        where = str(spec.module_path)
        operator = get_operator(spec.operator_name)(**spec.operator_args)
        mutated = mutate_code(sources[where], operator, spec.occurrence)
        behaviour = mutated and _behaviour(mutated)
        if not mutated or not behaviour or behaviour in known:
            continue
        known.add(behaviour)
        path = str(Path(where).relative_to(ROOT))
        yield Mutant(path, spec.operator_name, spec.occurrence, mutated)


class _Bare(ast.NodeTransformer):
    """Takes out what does nothing at run time."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else node


def _behaviour(source: str) -> str | None:
    """Return what runs, in a form to compare; None where nothing can."""
    try:
        return ast.dump(_Bare().visit(ast.parse(source)))
    except SyntaxError:  # cosmic-ray takes the star of a signature for an operator
        return None


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="What `make` wrote.")],
    jobs: Annotated[int, typer.Option(min=1)] = 2,
    limit: Annotated[int, typer.Option(help="Seconds for one mutant.")] = 600,
    deadline: Annotated[
        int, typer.Option(help="Seconds after which no further mutant is begun.")
    ] = 10**6,
    skip: Annotated[int, typer.Option(min=0, help="Leave out the first ones.")] = 0,
    tests: Annotated[
        list[str] | None, typer.Option(help="By default those of the mutated folder.")
    ] = None,
) -> None:
    """Run the tests on every mutant."""
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    chosen = [
        Mutant(**json.loads(path.read_text()))
        for path in sorted(folder.glob("[0-9]*.json"))
    ]
    tests = tests or [f"tests/{facts['of']}"]
    chosen = chosen[skip:]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copy = Path(temporary, str(number))
            shutil.copytree(ROOT, copy, symlinks=True, ignore=WITHOUT)
            copies.put(copy)

        def trial(mutant: Mutant | None) -> str | None:
            if time.monotonic() - started > deadline:
                return None
            copy = copies.get()
            try:
                verdict = _trial(copy, mutant, tests, limit)
            finally:
                copies.put(copy)
            place = chosen.index(mutant) + skip if mutant else "the code as it is"
            _say(f"{verdict} {place} at {time.monotonic() - started:.0f} s")
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            baseline, *verdicts = pool.map(trial, [None, *chosen])
    if baseline != "survived":
        raise SystemExit(f"The tests do not pass on the code as it is: {baseline}.")
    counts = {name: verdicts.count(name) for name in ("killed", "timeout", "survived")}
    survivors = [m for m, v in zip(chosen, verdicts, strict=True) if v == "survived"]
    for mutant in survivors:
        print(mutant.diff, end="\n\n")
    tried = sum(counts.values())
    share = 1 - counts["survived"] / max(1, tried)
    print(f"{tried - counts['survived']} of {tried} killed: {share:.1%}")
    report = {
        **facts,
        "tried": tried,
        **counts,
        "seconds": round(time.monotonic() - started),
        "survivors": [{"operator": m.operator, "diff": m.diff} for m in survivors],
    }
    print(json.dumps(report))


def _trial(copy: Path, mutant: Mutant | None, tests: list[str], limit: int) -> str:
    """Return "killed", "timeout" or "survived"."""
    if mutant is None:
        return _outcome(copy, tests, limit)
    target = copy / mutant.path
    original = target.read_text(encoding="utf-8")
    target.write_text(mutant.source, encoding="utf-8")
    try:
        return _outcome(copy, _nearest_first(copy, mutant, tests), limit)
    finally:
        target.write_text(original, encoding="utf-8")


def _nearest_first(copy: Path, mutant: Mutant, tests: list[str]) -> list[str]:
    """Return the test files, those named after the mutated file first.

    Files, because pytest drops a file that stands beside its folder.
    """
    stem = Path(mutant.path).stem
    files = [
        path
        for test in tests
        for path in (sorted((copy / test).glob("test_*.py")) or [copy / test])
    ]
    files.sort(key=lambda path: (stem not in path.stem, path.stem not in QUICK))
    return [str(path.relative_to(copy)) for path in files]


def _outcome(copy: Path, tests: list[str], limit: int) -> str:
    """Run the tests of a copy."""
    path = os.pathsep.join([str(copy / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", *tests]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": path, "HYPOTHESIS_PROFILE": "mutants"},
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    return "killed" if done.returncode else "survived"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
