"""Progress, tables and JSON values as commands show them."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from mlx_speculation.cli.commands.benchmark import _table
from mlx_speculation.cli.console import Screen, _duration, plain
from mlx_speculation.cli.measure import Arm
from mlx_speculation.engine import Origin, Statistics


def shown(*, terminal: bool) -> str:
    screen, written = Screen(), io.StringIO()
    screen.notes = Console(file=written, force_terminal=terminal, width=80)
    with screen.progress("reading") as report:
        report(3, 12)
    with screen.progress("loading"):
        pass
    return written.getvalue()


def test_a_bar_is_shown_on_a_terminal_and_is_gone_at_the_end() -> None:
    written = shown(terminal=True)
    assert "reading" in written
    assert "3/12" in written
    assert "loading" in written
    assert written.endswith("\x1b[2K")  # the line is erased


def test_a_line_is_shown_elsewhere_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(terminal=False) == ""
    monkeypatch.setattr("mlx_speculation.cli.console.QUIET_SECONDS", 0.0)
    assert shown(terminal=False) == "reading: 3/12\n"


def test_the_time_left_is_estimated_anew_for_each_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_speculation.cli.console.QUIET_SECONDS", 0.0)
    seconds = iter([0.0, 50.0, 53.0, 59.0, 80.0, 84.0])
    monkeypatch.setattr(
        "mlx_speculation.cli.console.time.monotonic", lambda: next(seconds)
    )
    screen, written = Screen(), io.StringIO()
    screen.notes = SimpleNamespace(  # type: ignore[assignment]
        is_terminal=False, print=lambda line, **_: written.write(f"{line}\n")
    )
    monkeypatch.setattr("mlx_speculation.cli.console.Progress", MagicMock())
    with screen.progress("a") as report:
        for counts in ((1, 5), (2, 5), (5, 5), (1, 7), (2, 7)):
            report(*counts)
    left = [line.partition(", ")[2] for line in written.getvalue().splitlines()]
    assert left == ["", "about 9 s left", "", "", "about 20 s left"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (119.9, "120 s"), (130, "2 minutes"), (1000, "17 minutes")],
)
def test_long_times_are_in_minutes(seconds: float, said: str) -> None:
    assert _duration(seconds) == said


@pytest.mark.parametrize("width", [20, 40, 70, 120])
def test_a_table_keeps_its_figures_on_a_narrow_terminal(width: int) -> None:
    screen, written = Screen(), io.StringIO()
    screen.out = Console(file=written, width=width)
    arm = Arm("adaptive k", 4, speeds=[1234.5, 678.9])
    arm.totals = Statistics(drafts=3, drafted=9, accepted=6, reached=[3, 2, 1])
    screen.table(_table([arm], arm, "2 passes"))
    shown = written.getvalue()
    for figure in ("adaptive k", "956.7", "1.00..1.00", "67%", "100", "33"):
        assert figure in shown
    assert "…" not in shown
    if width == 120:
        assert max(map(len, shown.splitlines())) < 90  # not wider than needed


def test_a_long_word_is_folded_and_not_cut_off() -> None:
    screen, written = Screen(), io.StringIO()
    screen.out = Console(file=written, width=30)
    table = Table("what", "here")
    table.add_row("costs are kept in", "/a/path/of/some/forty/characters/or/more")
    screen.table(table)
    cells = [line.split("│") for line in written.getvalue().splitlines()]
    folded = "".join(cell[2].strip() for cell in cells if len(cell) > 2)
    assert folded == "/a/path/of/some/forty/characters/or/more"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(st.text() | st.integers(), inner),
    ),
)


@given(VALUES)
def test_every_value_becomes_strict_json(value: Any) -> None:
    text = json.dumps(plain(value), allow_nan=False)
    if not isinstance(value, list | tuple | dict):
        finite = not isinstance(value, float) or math.isfinite(value)
        assert json.loads(text) == (value if finite else None)


def test_paths_and_dataclasses_become_plain() -> None:
    converted = plain({"a": Path("x") / "y", "b": Origin("accepted", 2), "c": (1, {2})})
    assert converted == {
        "a": str(Path("x") / "y"),
        "b": {"writer": "accepted", "place": 2},
        "c": [1, [2]],
    }
