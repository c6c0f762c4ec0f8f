"""What a mutant is, and where it lies.

Knows nothing of how mutants are made or judged.
"""

import difflib
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = frozenset({"__init__.py"})


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
    def original(self) -> str:
        """The file as it is."""
        return text_of(ROOT / self.path)

    @property
    def diff(self) -> str:
        """The change, as a unified diff without context."""
        before, after = self.original.splitlines(), self.source.splitlines()
        lines = difflib.unified_diff(
            before, after, self.path, self.path, lineterm="", n=0
        )
        return "\n".join(lines)

    @property
    def changed(self) -> set[int]:
        """The lines of the original that differ, counted from 1.

        Where lines only come in, these are the two around the place.
        """
        before, after = self.original.splitlines(), self.source.splitlines()
        found: set[int] = set()
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        for kind, start, stop, _, _ in matcher.get_opcodes():
            if kind == "insert":
                found |= {start, start + 1}
            elif kind != "equal":
                found |= set(range(start + 1, stop + 1))
        return found


def sources(of: str, root: Path = ROOT) -> list[Path]:
    """Return the files of a folder that are mutated."""
    return [p for p in sorted((root / of).rglob("*.py")) if p.name not in LEFT_OUT]


@functools.cache
def text_of(path: Path) -> str:
    """Return a file as it was when first read, however long a run takes."""
    return path.read_text(encoding="utf-8")


def digests(of: str, root: Path = ROOT) -> dict[str, str]:
    """Return what tells whether a file has changed since."""
    return {
        str(path.relative_to(root)): hashlib.sha256(text_of(path).encode()).hexdigest()
        for path in sources(of, root)
    }


def check_digests(
    recorded: dict[str, str], now: dict[str, str], what: str, remedy: str
) -> None:
    """Refuse what was made from other sources.

    Raises:
        SystemExit: a file was changed, added or removed since.
    """
    names = recorded.keys() | now.keys()
    differ = sorted(name for name in names if recorded.get(name) != now.get(name))
    if differ:
        raise SystemExit(
            f"{what} was made from other sources: {', '.join(differ)} differ. {remedy}"
        )


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what `make` wrote about its mutants, whose sources must be unchanged."""
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text("utf-8"))
    recorded: dict[str, str] = facts.pop("sources")
    now = digests(facts["of"])
    check_digests(recorded, now, str(folder), "Run `make` again.")
    return facts


def read_mutants(folder: Path) -> dict[str, Mutant]:
    """Return the mutants of a folder by name."""
    return {
        path.stem: Mutant(**json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("[0-9]*.json"))
    }
