"""README and pages of the documentation, and the code in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [README, *PAGES]


def name_of(page: Path) -> str:
    """Return the path of a page from the root of the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    fenced = rf"^```{language}\n(.*?)^```"
    text = page.read_text("utf-8")
    return re.findall(fenced, text, flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the commands in the shell blocks of a page, as lists of words."""
    for block in blocks(page, "sh"):
        pending = ""
        for line in block.replace("\\\n", " ").splitlines():
            pending = f"{pending}\n{line}" if pending else line
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quoted text continues on the next line
                continue
            pending = ""
            yield from _parted(words)
        assert not pending, f"{name_of(page)}: a quotation is not closed: {pending}"


def _parted(words: list[str]) -> Iterator[list[str]]:
    """Yield the commands that `&&` joins in a line."""
    part: list[str] = []
    for word in [*words, "&&"]:
        if word != "&&":
            part.append(word)
        elif part:
            yield part
            part = []
