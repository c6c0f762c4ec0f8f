"""Mutants of a toy project: judged by the tests that run them, and resumed."""

import importlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mutation.mutant import digests
from support.processes.wait_until import until

SCRIPTS = Path(__file__).parents[2] / "scripts"

TOY = """\
import functools

LIMIT = 3


def clip(value, low=0):
    if value < low:
        return low
    return value


def count(left):
    total = 0
    while left > 0:
        left -= 1
        total += 1
    return total


def unused(value):
    return value + 1


def near(a, b):
    return (
        a
        - b
    ) < LIMIT


@functools.cache
def slow_sum(n):
    return n + 100


def shared():
    return 5
"""
TEST_TOY = """\
import pytest
from toy.counting import clip, count, near, shared, slow_sum

@pytest.fixture(name="five", scope="module")
def _five():
    return shared()

def test_first(five):
    assert slow_sum(1) > 0

def test_clip():
    assert [clip(-1), clip(0), clip(2)] == [0, 0, 2]

@pytest.mark.parametrize("left", [0, 3], ids=["none", "a [b::c] d"])
def test_count(left):
    assert count(left) == left

def test_the_sum():
    assert slow_sum(1) == 101

def test_five(five):
    assert five == 5
"""
TEST_NEAR = """\
from toy.counting import near

def test_near():
    assert near(9, 8)
    assert not near(9, 1)
"""
MUTANTS = {  # old text, new text, verdict, note
    "looping": ("left -= 1", "left -= 0", "timeout", "one test in 2 s"),
    "equal": ("value < low", "value <= low", "survived", ""),
    "default": ("low=0", "low=1", "killed", "test_toy.py::test_clip"),
    "unused": ("value + 1", "value - 1", "survived", "no test runs this line"),
    "second line": ("        - b", "        + b", "killed", "test_near.py::test_near"),
    "constant": ("LIMIT = 3", "LIMIT = 4", "survived", ""),
    "import": ("LIMIT = 3", "LIMIT = 3 / 0", "killed", "tests/toy/test_"),
    "cached": ("n + 100", "n + 101", "killed", "test_toy.py::test_the_sum"),
    "in a fixture": ("return 5", "return 6", "killed", "test_toy.py::test_five"),
}


class Project:
    """A toy package beside a copy of the script."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "mutants"
        for folder in ("toy", "tests/toy", "src", "mutants"):
            (root / folder).mkdir(parents=True)
        (root / "src/toy").symlink_to("../toy")
        (root / "toy/__init__.py").touch()
        (root / "toy/counting.py").write_text(TOY)
        (root / "tests/toy/test_toy.py").write_text(TEST_TOY)
        (root / "tests/toy/test_near.py").write_text(TEST_NEAR)
        options = "[tool.pytest.ini_options]\naddopts = ['-ra']\n"
        (root / "pyproject.toml").write_text(options)
        shutil.copytree(SCRIPTS / "mutation", root / "scripts/mutation")
        shutil.copy(SCRIPTS / "mutate.py", root / "scripts")

    def write(self, sources: list[str]) -> None:
        for index, source in enumerate(sources):
            mutant = {"path": "toy/counting.py", "operator": "by hand"}
            text = json.dumps({**mutant, "occurrence": 0, "source": source})
            (self.folder / f"{index:04}.json").write_text(text)
        facts = {"of": "toy", "sources": digests("toy", self.root)}
        (self.folder / "facts.json").write_text(json.dumps(facts))

    def call(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "scripts/mutate.py", command, "mutants", *options],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )

    def report(self, command: str, *options: str) -> dict[str, Any]:
        done = self.call(command, *options)
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        lines = (self.folder / "results.jsonl").read_text().splitlines()
        return {result["mutant"]: result for result in map(json.loads, lines)}


@pytest.fixture(name="project")
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of a start's time
    return Project(tmp_path)


@pytest.fixture(name="statements")
def _statements(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("mutation.statements")


@pytest.fixture(name="processes")
def _processes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("mutation.processes")


@pytest.mark.slow
def test_every_mutant_gets_its_verdict_from_the_tests_that_run_it(
    project: Project,
) -> None:
    project.write([TOY.replace(old, new) for old, new, _, _ in MUTANTS.values()])
    covered = project.report("cover", "--jobs", "2")
    assert covered["tests"] == 7
    assert covered["failed"] == []
    report = project.report("run", "--jobs", "2", "--grace", "2")
    results = project.results
    tests = {name: results[f"{i:04}"]["tests"] for i, name in enumerate(MUTANTS)}
    for index, (name, (_, _, verdict, note)) in enumerate(MUTANTS.items()):
        found = results[f"{index:04}"]
        assert found["verdict"] == verdict, (name, found)
        assert note in found["note"], name
    assert tests == {
        "looping": 1,  # the other one does not enter the loop
        "equal": 1,
        "default": 1,
        "unused": 0,
        "second line": 1,
        "constant": 7,
        "import": 7,
        "cached": 2,  # though only the first one in the process runs it
        "in a fixture": 6,  # all of that file
    }
    counts = {"tried": 9, "killed": 5, "timeout": 1, "survived": 3}
    assert {name: report[name] for name in counts} == counts
    assert report["share"] == 0.6667
    assert report["baseline"] is True
    notes = [survivor["note"] for survivor in report["survivors"]]
    assert notes == ["1 tests pass", "no test runs this line", "7 tests pass"]
    assert "+    if value <= low:" in report["survivors"][0]["diff"]
    assert project.report("report") == report


@pytest.mark.slow
def test_a_test_that_fails_under_coverage_counts_for_every_line(
    project: Project,
) -> None:
    test = "import sys\nfrom toy.counting import unused\ndef test_shy():\n"
    test += "    assert 'coverage' not in sys.modules\n    assert unused(1) == 2\n"
    (project.root / "tests/toy/test_shy.py").write_text(test)
    project.write([TOY.replace("value + 1", "value - 1")])
    failed = project.report("cover", "--tests", "tests/toy/test_shy.py")["failed"]
    assert failed == ["tests/toy/test_shy.py::test_shy"]
    assert project.report("run", "--jobs", "2")["killed"] == 1


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_cut_off(project: Project) -> None:
    changes = [("value + 1", "value - 1"), ("return low", "return 7")]
    project.write([TOY.replace(old, new) for old, new in changes])
    done = '{"mutant": "0000", "verdict": "timeout", "note": "", "tests": 3, '
    done += '"seconds": 1}\n'
    (project.folder / "results.jsonl").write_text(done + '{"mutant": "0001", "ver')
    report = project.report("run", "--jobs", "2")  # without cover.json: all tests
    assert report["tried"] == 2
    assert project.results["0000"]["verdict"] == "timeout"
    assert project.results["0001"]["verdict"] == "killed"
    before = (project.folder / "results.jsonl").read_bytes()
    assert project.report("run") == report
    assert (project.folder / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize("deadline", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_what_a_deadline_ends_is_left_to_the_next_run(
    project: Project, deadline: str
) -> None:
    project.write([TOY.replace("left -= 1", "left -= 0")])
    report = project.report("run", "--deadline", deadline)
    assert report["tried"] == 0
    assert deadline == "2" or report["baseline"] is False


def test_nothing_is_judged_by_tests_that_do_not_pass(project: Project) -> None:
    project.write([TOY.replace("return low", "return 7")])
    (project.root / "tests/toy/test_wrong.py").write_text("def test_x():\n    1 / 0\n")
    done = project.call("run", "--jobs", "2")
    assert done.returncode == 1
    assert "do not pass on the code as it is: killed: tests/toy/test_wr" in done.stderr
    assert project.results == {}


def test_other_sources_are_refused(project: Project) -> None:
    project.write([])
    (project.root / "toy/counting.py").write_text(TOY + "\n")
    done = project.call("run")
    assert done.returncode == 1
    assert "made from other sources: toy/counting.py differ" in done.stderr


def test_a_file_is_itself_again_before_the_next_mutant(project: Project) -> None:
    (project.root / "toy/other.py").write_text("ONE = 1\n")
    project.write([TOY.replace("return low", "return 7"), "ONE = 2\n"])
    other = json.loads((project.folder / "0001.json").read_text())
    text = json.dumps({**other, "path": "toy/other.py"})
    (project.folder / "0001.json").write_text(text)
    project.report("run", "--jobs", "1")
    verdicts = [result["verdict"] for result in project.results.values()]
    assert verdicts == ["killed", "survived", "survived"]  # the baseline is last


def test_what_never_ends_is_ended_with_its_children(
    project: Project, processes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = project.root / "beat"
    child = f"import pathlib\nwhile True: pathlib.Path({str(beat)!r}).write_text('x')"
    lines = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    (project.root / "test_loop.py").write_text(lines)

    class Sooner(subprocess.Popen[bytes]):
        """A process whose time is over once its child has begun."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            until(beat.exists, timeout)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(processes.subprocess, "Popen", Sooner)
    limits = processes.Limits(test=100, all=60)
    found = processes.outcome(project.root, ["test_loop.py"], limits)
    assert found == ("timeout", "all tests in 60 s")
    beat.unlink()
    time.sleep(0.2)
    assert not beat.exists()


def test_tests_are_run_in_the_order_given(
    project: Project, processes: ModuleType
) -> None:
    ran = project.root / "ran"
    name = "test_1[a [b::c] d]"
    order = ["b.py::test_2", f"a.py::{name}", f"b.py::{name}", "a.py::test_2"]
    test = f"""\
import pytest
@pytest.fixture(autouse=True)
def write(request):
    with open({str(ran)!r}, "a") as file:
        file.write(request.node.nodeid + "\\n")
@pytest.mark.parametrize("x", [0], ids=["a [b::c] d"])
def test_1(x): pass
def test_2(): pass
"""
    (project.root / "a.py").write_text(test)
    (project.root / "b.py").write_text(test)
    limits = processes.Limits(test=100, all=100)
    assert processes.outcome(project.root, order, limits) == ("survived", "")
    assert ran.read_text().splitlines() == order


SOURCE = """\
@decorated(
    1
)
def outer(a=1,
          b=2):
    if (a
            and b):
        x = 1
    elif b:
        x = f(
            2,
        )
    else:
        x = 3
    try:
        g()
    except (
        KeyError
    ):
        h()
    while True:
        break

    def inner(c=3):
        return c
    match x:
        case 1:
            y = 2
        case 3 if a:
            y = 4
    return x
class K:
    z = 1
    def method(self): return 1
"""


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (2, range(6, 32)),  # a decorator: what runs the function
        (5, range(6, 32)),  # a default
        (7, {6, 7}),  # the head of the condition
        (8, {8}),
        (9, {9, 13}),  # an elif is a condition inside, and has the else
        (11, {10, 11, 12}),
        (18, {17, 18, 19}),  # a handler
        (16, {16}),
        (21, {21, 22}),  # a loop without end
        (22, {21, 22}),
        (24, {24, 25}),  # a function inside runs with the outer one
        (25, {25}),
        (29, {26, 27, 29}),  # the cases of a match
        (30, {30}),
        (33, None),
        (34, {34}),
    ],
)
def test_a_changed_line_is_told_by_its_statement(
    statements: ModuleType, line: int, lines: set[int] | range | None
) -> None:
    found = statements.telling_lines(SOURCE, {line})
    assert found == (None if lines is None else set(lines))


def test_lines_that_run_at_import_are_told_by_all_tests(statements: ModuleType) -> None:
    assert statements.telling_lines(SOURCE, {8, 33}) is None
    assert statements.telling_lines(SOURCE, {8, 31}) == {8, 31}
