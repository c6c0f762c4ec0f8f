"""The page of all architectures is current."""

import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_the_page_of_architectures_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python scripts/census.py docs/architectures.md` writes the page."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    page = (SCRIPTS.parent / "docs" / "architectures.md").read_text("utf-8")
    assert page == importlib.import_module("census").page()
    lines = page.splitlines()
    assert "| afm7 | 2 KVCache |  | rows | yes |  |  |" in lines
    assert sum(line.startswith("| ") for line in lines) > 120
