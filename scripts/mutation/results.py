"""What was found of each mutant, written as it is found, and the report."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from mutation.mutant import Mutant

VERDICTS = ("killed", "timeout", "survived")
BASELINE = "the code as it is"
UNCOVERED = "no test runs this line"


@dataclass(frozen=True, slots=True)
class Result:
    """One mutant's verdict.

    Attributes:
        mutant: its name.
        verdict: one of `VERDICTS`.
        note: the test that failed, the limit that ended it, or why it survived.
        tests: how many were to run.
        seconds: that they took.
    """

    mutant: str
    verdict: str
    note: str
    tests: int
    seconds: float


class Results:
    """The file results.jsonl, one line per result."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "results.jsonl"
        self._lock = Lock()
        self.known: dict[str, Result] = {}
        if not self._path.exists():
            return
        text = self._path.read_text(encoding="utf-8")
        # A run that was cut off may leave part of a line.
        whole = text[: text.rfind("\n") + 1]
        self._path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            result = Result(**json.loads(line))
            self.known[result.mutant] = result

    def add(self, result: Result) -> None:
        """Keep a result. May be called from several threads."""
        with self._lock:
            self.known[result.mutant] = result
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")

    def forget(self) -> None:
        """Take back all results: they were found with tests that do not pass."""
        with self._lock:
            self._path.write_text("", encoding="utf-8")
            self.known.clear()


def report(
    facts: dict[str, Any], mutants: Mapping[str, Mutant], results: Results
) -> dict[str, Any]:
    """Print each survivor's diff and the totals; return all of it."""
    judged = {n: results.known[n] for n in mutants if n in results.known}
    verdicts = [result.verdict for result in judged.values()]
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    survivors = []
    for name, result in judged.items():
        if result.verdict != "survived":
            continue
        mutant = mutants[name]
        note = result.note or f"{result.tests} tests pass"
        print(f"{name}: {note}\n{mutant.diff}", end="\n\n")
        survivors.append(
            {
                "mutant": name,
                "operator": mutant.operator,
                "note": note,
                "diff": mutant.diff,
            }
        )
    tried = len(judged)
    share = 1 - counts["survived"] / max(1, tried)
    listed = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    print(f"{tried} of {len(mutants)} tried: {listed}; noticed {share:.1%}")
    if BASELINE not in results.known:
        print("Whether the tests pass on the code as it is, is not known yet.")
    return {
        **facts,
        "tried": tried,
        **counts,
        "share": round(share, 4),
        "seconds": round(sum(result.seconds for result in judged.values())),
        "baseline": BASELINE in results.known,
        "survivors": survivors,
    }
