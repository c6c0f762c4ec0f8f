"""Which tests run which lines: one run of the tests under coverage.py.

The tests of a file run in a process of their own. cover.json holds

    sources  the digest of every file of the mutated folder
    tests    [node id, seconds, whether it passed], in the order of files and lines
    sets     lists of indices into tests
    lines    path -> line -> index into sets: the tests that ran the line

Lines that run at import are there too, for all tests of the files that import them.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutation.mutant import ROOT, check_digests, digests, text_of
from mutation.processes import say, test_environment

_Lines = dict[str, dict[int, set[str]]]
_Tests = dict[str, dict[str, Any]]


def write_cover(folder: Path, of: str, tests: list[str], jobs: int) -> dict[str, Any]:
    """Write cover.json and return its counts."""
    files = test_files(tests)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(lambda f: _cover_file(Path(temporary), of, f), files)
        known: _Tests = {}
        lines: _Lines = {}
        for some_tests, some_lines in parts:
            known |= some_tests
            for path, by_line in some_lines.items():
                for line, names in by_line.items():
                    lines.setdefault(path, {}).setdefault(line, set()).update(names)
    before = digests(of)
    text_of.cache_clear()
    check_digests(before, digests(of), "The cover", "Run `cover` again.")
    text = json.dumps({"sources": before, **_packed(known, lines)})
    (folder / "cover.json").write_text(text, encoding="utf-8")
    failed = [name for name, test in known.items() if not test["passed"]]
    seconds = sum(test["seconds"] for test in known.values())
    return {"tests": len(known), "failed": failed, "seconds": round(seconds)}


def test_files(tests: list[str]) -> list[str]:
    """Return the files of tests in files and folders, from the project's root."""
    paths = [ROOT / test for test in tests]
    files = [
        sorted(path.rglob("test_*.py")) if path.is_dir() else [path] for path in paths
    ]
    return [str(file.relative_to(ROOT)) for some in files for file in some]


def _cover_file(temporary: Path, of: str, file: str) -> tuple[_Tests, _Lines]:
    """Run one file of tests."""
    name = file.replace("/", "-")
    data, tests = temporary / f"{name}.data", temporary / f"{name}.json"
    command = [sys.executable, "-B", "-m", "coverage", "run"]
    command += [f"--source={ROOT / of}", f"--data-file={data}", "-m", "pytest", "-q"]
    command += ["-p", "mutation.contexts", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = test_environment(ROOT) | {
        "COVERAGE_CORE": "ctrace",  # the one that keeps contexts in every Python
        "MUTATION_FOLDER": str(ROOT / of),
        "MUTATION_TESTS": str(tests),
    }
    scripts = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] += os.pathsep + scripts
    done = subprocess.run(
        [*command, file], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    # 1: a test failed; 5: none is left by the markers.
    if done.returncode not in (0, 1, 5) or not tests.exists():
        text = (done.stdout + done.stderr).decode(errors="replace")
        raise SystemExit(f"{file} does not run under coverage:\n{text}")
    known: _Tests = json.loads(tests.read_text(encoding="utf-8"))
    failed = [test for test, facts in known.items() if not facts["passed"]]
    say(f"{file}: {len(known)} tests, failed: {', '.join(failed) or 'none'}")
    return known, _read(data, list(known))


def _read(path: Path, tests: list[str]) -> _Lines:
    """Return the tests that ran each line, those of no name standing for all."""
    from coverage import CoverageData

    from mutation.contexts import SHARED

    data = CoverageData(str(path))
    data.read()
    lines: _Lines = {}
    for file in data.measured_files():
        where = str(Path(file).relative_to(ROOT))
        lines[where] = {
            line: set(tests if SHARED in names else names)
            for line, names in data.contexts_by_lineno(file).items()
        }
    return lines


def _packed(known: _Tests, lines: _Lines) -> dict[str, Any]:
    """Return the tables, each set of tests written once."""
    index = {name: number for number, name in enumerate(known)}
    sets: dict[tuple[int, ...], int] = {}
    packed = {
        path: {
            line: sets.setdefault(tuple(sorted(index[n] for n in names)), len(sets))
            for line, names in sorted(by_line.items())
        }
        for path, by_line in sorted(lines.items())
    }
    tests = [[name, test["seconds"], test["passed"]] for name, test in known.items()]
    return {
        "tests": tests,
        "sets": [list(numbers) for numbers in sets],
        "lines": packed,
    }
