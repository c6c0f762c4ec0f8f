"""Progress and objects, as commands show them."""

import io
import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlx_speculation.cli.screen import Screen, plain
from mlx_speculation.engine import Origin


def shown(*, terminal: bool) -> str:
    """Return what a bar writes."""
    screen, written = Screen(), io.StringIO()
    screen.notes = Console(file=written, force_terminal=terminal, width=80)
    with screen.progress("reading") as report:
        report(3, 12)
    with screen.busy("loading"):
        pass
    return written.getvalue()


def test_a_bar_is_shown_on_a_terminal_and_is_gone_at_the_end() -> None:
    written = shown(terminal=True)
    assert "reading" in written
    assert "3/12" in written
    assert "loading" in written
    assert written.endswith("\x1b[2K")  # the line is erased


def test_no_bar_is_shown_elsewhere() -> None:
    assert shown(terminal=False) == ""


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
    found = plain({"a": Path("x") / "y", "b": Origin("accepted", 2), "c": (1, {2})})
    assert found == {
        "a": str(Path("x") / "y"),
        "b": {"writer": "accepted", "place": 2},
        "c": [1, [2]],
    }
