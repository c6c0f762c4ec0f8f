"""The table of all architectures, for three of them."""

import importlib
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_a_row_tells_how_a_part_is_kept_and_whether_texts_are_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ["gpt2", "gear", "phi3small"]
    monkeypatch.setattr(sys, "argv", ["census.py", *names, "--tokens", "8"])
    importlib.import_module("census").main()
    lines = capsys.readouterr().out.splitlines()
    assert "| gpt2 | 2 KVCache | rows | yes | 6 texts equal |" in lines
    assert any(line.startswith("| gear |") and "| replay |" in line for line in lines)
    assert "| phi3small | 2 KVCache |  | no | no drafts: its rows are mixed |" in lines
    assert "| olmo | it needs the package ai2-olmo |" in lines
    summary = json.loads(lines[-1])
    assert summary["architectures"] == 3
    assert summary["different"] == []


def test_the_page_of_architectures_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python scripts/census.py --page docs/architectures.md` writes it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    page = (SCRIPTS.parent / "docs" / "architectures.md").read_text("utf-8")
    assert page == importlib.import_module("census").page()


def test_the_page_is_written_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    file = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["census.py", "--page", str(file)])
    census = importlib.import_module("census")
    census.main()
    lines = file.read_text("utf-8").splitlines()
    assert "| afm7 | 2 KVCache |  | rows | yes |  |  |" in lines
    assert sum(line.startswith("| ") for line in lines) > 120
