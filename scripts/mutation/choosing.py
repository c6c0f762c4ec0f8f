"""Which tests may notice a mutant, and in which order they are asked."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation.mutant import Mutant, check_digests, digests
from mutation.statements import telling_lines

# Times closer than this factor are equal, so that the tests of a file stay together:
# a fixture of the file is made again whenever another file comes between.
_STEP = 3.0
_QUICK = 0.1  # seconds; all quicker tests are equal


@dataclass(frozen=True, slots=True)
class Cover:
    """What cover.json says.

    Attributes:
        seconds: of each test, in the order of files and lines.
        failed: tests that failed under coverage, so that not all of their lines are
            known. They count for every line.
        lines: path -> line -> the tests that ran it.
    """

    seconds: dict[str, float]
    failed: frozenset[str]
    lines: dict[str, dict[int, frozenset[str]]]

    def tests_for(self, mutant: Mutant) -> list[str]:
        """Return the tests that ran what a mutant changes, in the order to run them.

        Quick ones first, and among equals those of the file named after the mutated
        one. Where the change runs at import, these files come first altogether.
        """
        lines = telling_lines(mutant.original, mutant.changed)
        stem = Path(mutant.path).stem
        numbers = {name: number for number, name in enumerate(self.seconds)}

        def far(name: str) -> bool:
            return stem not in Path(name.partition("::")[0]).stem

        def order(name: str) -> tuple[Any, ...]:
            step = self._step(name)
            first = (far(name), step) if lines is None else (step, far(name))
            return (*first, numbers[name])

        by_line = self.lines.get(mutant.path, {})
        found = set(self.seconds) if lines is None else set(self.failed)
        for line in lines or ():
            found |= by_line.get(line, frozenset())
        return sorted(found, key=order)

    def _step(self, name: str) -> int:
        return math.ceil(math.log(max(1.0, self.seconds[name] / _QUICK), _STEP))


def read_cover(folder: Path, of: str) -> Cover | None:
    """Return what cover.json says, None where there is none.

    Raises:
        SystemExit: the sources were changed since.
    """
    path = folder / "cover.json"
    if not path.exists():
        return None
    facts = json.loads(path.read_text(encoding="utf-8"))
    check_digests(facts["sources"], digests(of), str(path), "Run `cover` again.")
    names = [name for name, _, _ in facts["tests"]]
    sets = [frozenset(names[number] for number in one) for one in facts["sets"]]
    return Cover(
        seconds={name: seconds for name, seconds, _ in facts["tests"]},
        failed=frozenset(name for name, _, passed in facts["tests"] if not passed),
        lines={
            path: {int(line): sets[number] for line, number in by_line.items()}
            for path, by_line in facts["lines"].items()
        },
    )
