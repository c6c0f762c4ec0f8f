"""Runs the tests on every mutant, several at a time, each in a copy of the project."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from mutation.choosing import Cover
from mutation.mutant import ROOT, Mutant, check_digests, digests
from mutation.processes import Limits, outcome, say
from mutation.results import BASELINE, UNCOVERED, Result, Results

_WITHOUT = shutil.ignore_patterns(
    ".*", "__pycache__", "mutants", "mutants-*", "*.egg-info"
)
_FACTOR = 3  # beside what a test took under coverage
_START = 30  # seconds in which a process starts and finds its tests


@dataclass(frozen=True, slots=True)
class _Trial:
    """Tests to run on a mutant, or on the code as it is."""

    name: str
    mutant: Mutant | None
    tests: list[str]
    limits: Limits
    cost: float


class Judge:
    """Judges mutants until all are judged, or a deadline.

    Args:
        cover: which tests run which lines; None: every mutant runs all tests.
        of: the mutated folder.
        tests: all tests, as files, for when there is no cover.
        grace: seconds that tests may take beside three times their own.
        deadline: seconds from now at which the running tests are ended, too. Their
            mutants are left to the next run.
    """

    def __init__(
        self,
        results: Results,
        cover: Cover | None,
        *,
        of: str,
        tests: list[str],
        grace: float,
        deadline: float,
    ) -> None:
        self._results, self._cover = results, cover
        self._of, self._tests = of, tests
        self._grace = grace
        self._end = time.monotonic() + deadline
        self._copies: SimpleQueue[Path] = SimpleQueue()
        self._broken: str | None = None

    def judge(self, mutants: dict[str, Mutant], jobs: int) -> None:
        """Judge what has no result yet.

        The longest come first, so that no core waits for one of them at the end.

        Raises:
            SystemExit: the tests do not pass on the code as it is.
        """
        left = {n: m for n, m in mutants.items() if n not in self._results.known}
        trials = sorted(
            (self._trial(n, m) for n, m in left.items()), key=_longest_first
        )
        baseline = [] if BASELINE in self._results.known else self._baseline()
        say(f"{len(trials)} of {len(mutants)} mutants to judge")
        with _copies(jobs, self._copies, self._of), ThreadPoolExecutor(jobs) as pool:
            passed = [pool.submit(self._try, trial) for trial in baseline]
            done = [pool.submit(self._try, trial) for trial in trials]
            whole = all(future.result() for future in passed)
            for future in done:
                future.result()
        if self._broken:
            self._results.forget()
            raise SystemExit(
                f"The tests do not pass on the code as it is: {self._broken}. "
                "Nothing is judged by them; fix them or run `cover` again."
            )
        if whole and baseline:
            seconds = sum(trial.cost for trial in baseline)
            count = sum(len(trial.tests) for trial in baseline)
            self._results.add(Result(BASELINE, "survived", "", count, seconds))

    def _baseline(self) -> list[_Trial]:
        """Return every test on the code as it is, a process for each file."""
        files: dict[str, list[str]] = {}
        for test in self._cover.seconds if self._cover else self._tests:
            files.setdefault(test.partition("::")[0], []).append(test)
        trials = [self._with_limits(BASELINE, None, some) for some in files.values()]
        return sorted(trials, key=_longest_first)

    def _trial(self, name: str, mutant: Mutant) -> _Trial:
        if self._cover:
            tests = self._cover.tests_for(mutant)
        else:
            near = Path(mutant.path).stem
            tests = sorted(self._tests, key=lambda test: near not in Path(test).stem)
        return self._with_limits(name, mutant, tests)

    def _with_limits(
        self, name: str, mutant: Mutant | None, tests: list[str]
    ) -> _Trial:
        if not self._cover:
            return _Trial(name, mutant, tests, Limits(600, 600), 0)
        times = [self._cover.seconds[test] for test in tests]
        limits = Limits(
            test=self._grace + _FACTOR * max(times, default=0),
            all=_START + self._grace + _FACTOR * sum(times),
        )
        return _Trial(name, mutant, tests, limits, sum(times))

    def _try(self, trial: _Trial) -> bool:
        """Return whether it was judged."""
        left = self._end - time.monotonic()
        if self._broken or left <= 0:
            return False
        start = time.monotonic()
        if trial.tests:
            verdict, note = self._outcome(trial, left)
        else:
            verdict, note = "survived", UNCOVERED
        if time.monotonic() >= self._end and verdict == "timeout":
            return False
        seconds = round(time.monotonic() - start, 1)
        say(f"{trial.name}: {verdict} in {seconds} s, {len(trial.tests)} tests {note}")
        if trial.mutant is not None:
            count = len(trial.tests)
            self._results.add(Result(trial.name, verdict, note, count, seconds))
        elif verdict != "survived":
            self._broken = f"{verdict}: {note}"
        return True

    def _outcome(self, trial: _Trial, left: float) -> tuple[str, str]:
        limits = Limits(trial.limits.test, min(left, trial.limits.all))
        copy = self._copies.get()
        try:
            if trial.mutant is None:
                return outcome(copy, trial.tests, limits)
            target = copy / trial.mutant.path
            original = target.read_text(encoding="utf-8")
            target.write_text(trial.mutant.source, encoding="utf-8")
            try:
                return outcome(copy, trial.tests, limits)
            finally:
                target.write_text(original, encoding="utf-8")
        finally:
            self._copies.put(copy)


def _longest_first(trial: _Trial) -> float:
    return -trial.cost


@contextmanager
def _copies(jobs: int, copies: SimpleQueue[Path], of: str) -> Iterator[None]:
    """Make a copy of the project for every process, of the sources first read."""
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(jobs):
            copy = Path(temporary, str(number))
            shutil.copytree(ROOT, copy, symlinks=True, ignore=_WITHOUT)
            check_digests(digests(of), digests(of, copy), "A copy", "Run again.")
            copies.put(copy)
        yield
