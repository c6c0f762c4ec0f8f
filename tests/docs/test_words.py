"""Texts for users use the words of the field, and none of those in `INSTEAD`."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from mlx_speculation.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
INSTEAD = {
    r"\blaws?\b": "distribution, probabilities",
    r"\blengths? by measurement\b": "adaptive draft length",
    r"\btold\b|\btelling\b": "leader, follower; says, sends",
    r"\bcontracts?\b": "convention",
    r"\bslots?\b": "KV cache",
    r"\bwant of memory\b": "out of memory",
    r"\bmend(s|ed)?\b": "fix",
    r"\bset aside\b": "disabled",
    r"\bhear(s|d|ing)?\b": "listener, prefill_progress",
}


def private(text: str) -> list[str]:
    """Return the words of `INSTEAD` in a text, but not in code and file names."""
    words = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    words = " ".join(words.split())
    return [
        f"{match[0]!r}: say {better}"
        for pattern, better in INSTEAD.items()
        for match in re.finditer(pattern, words, flags=re.IGNORECASE)
    ]


def helps() -> dict[str, str]:
    commands: Any = typer.main.get_command(app)
    return {
        name: "\n".join(
            [
                command.help,
                *(getattr(each, "help", None) or "" for each in command.params),
            ]
        )
        for name, command in commands.commands.items()
    }


def glossary() -> list[tuple[str, str]]:
    page = (ROOT / "docs/glossary.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]*)\|$", page, flags=re.MULTILINE)
    return [(words, place) for words, place in rows if words != "word"]


def test_the_glossary_has_each_word_once() -> None:
    words = [word for row, _ in glossary() for word in row.split(", ")]
    assert len(words) > 50
    assert sorted(words) == sorted(set(words))


def test_the_places_of_the_glossary_exist() -> None:
    for words, places in glossary():
        for name, path in re.findall(
            r"(?:`(\w+)` in )?`([\w/]+/(?:\w+\.py)?)`", places
        ):
            assert (ROOT / path).exists(), words
            if name:
                text = (ROOT / path).read_text("utf-8")
                assert re.search(rf"^class {name}\b|^{name} =", text, re.MULTILINE), (
                    words
                )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_the_words_of_the_field(page: Path) -> None:
    assert private(page.read_text("utf-8")) == []


def test_help_has_the_words_of_the_field() -> None:
    for name, text in helps().items():
        assert private(text) == [], name


def test_a_private_word_is_found() -> None:
    assert private("the law of the text, lengths by measurement")
    assert private("Mend\nit, and it is set\naside")
    assert private("`acceptance_laws.py`, flaws and a counsellor") == []
