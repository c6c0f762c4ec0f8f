"""Plots draw what was given: points, bars, levels and predicted lines."""

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
    {0: 100.0, 1: 140.0, 4: 210.0},
    Spread(205.0, 201.0, 207.0),
    (0.9, 0.5),
)
LOOKUP = Curve("lookup", {4: FAR}, {}, None, (0.25,))


def panel(title: str, plain: float, *curves: Curve) -> Panel:
    level, half = (Spread(x, 0.9 * x, 1.1 * x) for x in (plain, plain / 2))
    return Panel(title, level, curves, {"other": half})


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_measured_predicted_and_levels_stand_where_they_belong() -> None:
    figure = draw([panel("one", 110.0, MODEL)], title="all")
    speeds, accepted = figure.axes
    assert speeds.get_title() == "one"
    fixed, adaptive = speeds.containers
    marks, _, (ends,) = fixed
    assert points(marks) == [(1, 130), (4, 220)]
    mark, _, (end,) = adaptive
    assert points(mark) == [(5, 205)]  # right of the longest
    assert [(x, y) for x, y in end.get_segments()[0]] == [(5, 201), (5, 207)]
    assert speeds.get_ylim() == pytest.approx((0, 1.08 * 230))
    assert [[(x, y) for x, y in each] for each in ends.get_segments()] == [
        [(1, 120), (1, 135)],
        [(4, 180), (4, 230)],
    ]
    lines = {str(line.get_linestyle()): points(line) for line in speeds.lines}
    assert lines["--"][:3] == [(0, 100), (1, 140), (4, 210)]
    drawn = [points(line) for line in speeds.lines]
    assert [(0, 110), (1, 110)] in drawn
    assert [(0, 55), (1, 55)] in drawn
    assert points(accepted.lines[0]) == [(1, 90), (2, 50)]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "model",
        "plain",
        "other",
        "bars and bands: slowest to fastest pass",
        "predicted by costs and acceptance",
    ]


def test_a_drafter_has_one_colour_in_all_panels() -> None:
    both, alone = panel("both", 1.0, MODEL, LOOKUP), panel("alone", 2.0, LOOKUP)
    figure = draw([both, alone, both, both])
    assert len(figure.axes) == 2 * 2 * 3  # the last two of six places are empty
    below = [a for a in figure.axes if a.get_ylabel().startswith("accepted")]
    colours = [[line.get_color() for line in axes.lines] for axes in below]
    (model, lookup), (other,), *_ = colours
    assert model != lookup == other
    assert sum(axes.axison for axes in figure.axes) == 8


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    save_plot([panel("one", 1.0, MODEL)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"'plot\.txt'.* ending .*png"):
        check_plot(tmp_path / "plot.txt")
    with pytest.raises(InvalidRequestError, match="0 panels"):
        save_plot([], tmp_path / "plot.png")


def test_without_matplotlib_the_extra_is_named() -> None:
    """And nothing but drawing needs it."""
    code = (
        "import sys; sys.modules['matplotlib.figure'] = None\n"
        "from mlx_speculation import errors\nfrom mlx_speculation.cli import plots\n"
        "plots.Curve('model', {}, {}, None, ())\n"
        "try:\n    plots.check_plot('plot.png')\n"
        "except errors.MissingLibraryError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'mlx-speculation[plot]'" in done.stdout, done.stderr
