"""Plots draw the given points, bars and levels."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation.cli.measure import Spread
from mlx_speculation.cli.plots import (
    Curve,
    Panel,
    check_plot,
    draw,
    save_plot,
)
from mlx_speculation.errors import InvalidRequestError

FAR = Spread(220.0, 180.0, 230.0)
NEAR_AND_FAR = {1: Spread(130.0, 120.0, 135.0), 4: FAR}
MODEL = Curve(
    "model",
    NEAR_AND_FAR,
    Spread(205.0, 201.0, 207.0),
    (0.9, 0.5),
)
LOOKUP = Curve("lookup", {4: FAR}, None, (0.25,))


def panel(title: str, plain: float, *curves: Curve) -> Panel:
    level, half = (Spread(x, 0.9 * x, 1.1 * x) for x in (plain, plain / 2))
    return Panel(title, level, curves, {"other": half})


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_measured_points_and_levels_stand_where_they_belong() -> None:
    figure = draw(panel("one", 110.0, MODEL))
    speeds, accepted = figure.axes
    assert speeds.get_title() == "one"
    fixed, adaptive = speeds.containers
    marks, _, (ends,) = fixed
    assert points(marks) == [(1, 130), (4, 220)]
    mark, _, (end,) = adaptive
    assert points(mark) == [(5, 205)]  # right of the longest draft length
    assert [(x, y) for x, y in end.get_segments()[0]] == [(5, 201), (5, 207)]
    assert speeds.get_ylim() == pytest.approx((0, 1.08 * 230))
    assert [[(x, y) for x, y in each] for each in ends.get_segments()] == [
        [(1, 120), (1, 135)],
        [(4, 180), (4, 230)],
    ]
    drawn = [points(line) for line in speeds.lines]
    assert [(0, 110), (1, 110)] in drawn
    assert [(0, 55), (1, 55)] in drawn
    assert points(accepted.lines[0]) == [(1, 90), (2, 50)]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "model",
        "plain",
        "other",
        "bars and bands: slowest to fastest pass",
    ]


def test_a_drafter_has_the_same_colour_above_and_below() -> None:
    speeds, accepted = draw(panel("both", 1.0, MODEL, LOOKUP)).axes
    model, lookup = (line.get_color() for line in accepted.lines)
    assert model != lookup
    containers: Any = speeds.containers
    above = [bars.lines[0].get_color() for bars in containers]
    assert above == [model, model, lookup]


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    save_plot(panel("one", 1.0, MODEL), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"'plot\.txt'.* ending .*png"):
        check_plot(tmp_path / "plot.txt")


def test_without_matplotlib_the_extra_is_named() -> None:
    """Only drawing needs matplotlib."""
    code = (
        "import sys; sys.modules['matplotlib.figure'] = None\n"
        "from mlx_speculation import errors\nfrom mlx_speculation.cli import plots\n"
        "plots.Curve('model', {}, None, ())\n"
        "try:\n    plots.check_plot('plot.png')\n"
        "except errors.MissingLibraryError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'mlx-speculation[plot]'" in done.stdout, done.stderr
