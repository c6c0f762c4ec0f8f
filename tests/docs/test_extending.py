"""The pages on extending show parts of example programs. The programs run."""

import re
from pathlib import Path

import pytest

from support.processes.reader import Reader

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text("utf-8")
DRAFTER_PAGE = (ROOT / "docs/new_drafter.md").read_text("utf-8")
PROGRAMS = {
    "A new drafter": "drafter",
    "A new cache kind": "cache_kind",
    "A new MTP family": "mtp_family",
    "A new constraint": "constraint",
}
# The end of each program's output. A program that stops early does not print it.
SAYS = {
    "drafter": r"accepted=[1-9]\d*\)\nRuntimeError: out of ideas\n"
    r"\[[1-9]\d*, [1-9]\d*\]\nSourceCounts\(drafts=[1-9]\d*, .*\)\n$",
    "cache_kind": r"^[1-9]\d* of \d+ drafted tokens accepted\n$",
    "mtp_family": r"^[1-9]\d* tokens drafted by a random head\n$",
    "constraint": r"^[1-9]\d* of \d+ drafted tokens accepted\n$",
}


def program(name: str) -> Path:
    return ROOT / f"examples/extending/{name}.py"


def blocks() -> dict[str, list[str]]:
    shown_parts = {"A new drafter": shown(DRAFTER_PAGE)}
    parts = {part.splitlines()[0]: shown(part) for part in PAGE.split("\n## ")[1:]}
    return shown_parts | {heading: code for heading, code in parts.items() if code}


def shown(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", SAYS)
def test_a_program_runs(name: str, reader: Reader) -> None:
    said = reader.program(program(name))
    assert re.search(SAYS[name], said.out), said.out
    assert said.err == ""


def test_every_program_belongs_to_a_section_with_code() -> None:
    there = {path.stem for path in (ROOT / "examples/extending").glob("*.py")}
    assert there == set(PROGRAMS.values()) == set(SAYS)
    assert list(blocks()) == list(PROGRAMS)


@pytest.mark.parametrize("section", PROGRAMS)
def test_the_page_shows_parts_of_the_program_in_their_order(section: str) -> None:
    name = PROGRAMS[section]
    text, place = program(name).read_text("utf-8"), 0
    for block in blocks()[section]:
        begin = text.find(block, place)
        assert begin >= 0, f"examples/extending/{name}.py lacks:\n{block}"
        place = begin + len(block)


def test_the_page_names_each_program() -> None:
    for name in SAYS:
        assert f"examples/extending/{name}.py" in PAGE
