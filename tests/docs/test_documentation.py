"""The documentation builds without a warning, and what it shows runs."""

import re
from pathlib import Path
from typing import Any

import pytest

import mlx_speculation
from mlx_speculation.caches.kinds import JOURNALS
from mlx_speculation.models import mtp_families

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def sections(page: str) -> dict[str, list[str]]:
    """Return the Python blocks of a page, by the heading that they are under."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    found: dict[str, list[str]] = {}
    for part in text.split("\n## ")[1:]:
        blocks = re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)
        if blocks:
            found[part.splitlines()[0]] = blocks
    return found


@pytest.mark.parametrize(
    "section", ["A new drafter", "A new journal", "A new MTP family"]
)
def test_the_examples_of_the_page_on_extending_run(
    section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_families, "FAMILIES", mtp_families.FAMILIES)
    known = dict(JOURNALS)
    names: dict[str, Any] = {"__name__": "extending"}
    try:
        for block in sections("extending.md")[section]:
            exec(compile(block, f"extending.md, {section}", "exec"), names)
    finally:
        JOURNALS.clear()
        JOURNALS.update(known)


def test_every_section_with_code_on_extending_is_run() -> None:
    assert list(sections("extending.md")) == [
        "A new drafter",
        "A new journal",
        "A new MTP family",
    ]


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = {line.rpartition(".")[2] for line in text.splitlines() if ":::" in line}
    errors = {name for name in mlx_speculation.__all__ if _is_warning_or_error(name)}
    missing = set(mlx_speculation.__all__) - listed - errors - {"__version__"}
    assert not missing
    assert "::: mlx_speculation.errors" in text


def _is_warning_or_error(name: str) -> bool:
    value = getattr(mlx_speculation, name)
    return isinstance(value, type) and issubclass(value, Exception)


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:")[1]
    listed = re.findall(r"^ +- .+: (\w+\.md)$", nav, flags=re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_files_on_a_page_exist(page: Path) -> None:
    """Paths such as engine/draft_model.py, and links to other pages."""
    text = page.read_text("utf-8")
    tops = "engine|models|caches|samplers|tests|scripts|examples|docs"
    for path in set(re.findall(rf"\b(?:{tops})/[\w/]+\.\w+", text)):
        assert (ROOT / path).exists(), path
