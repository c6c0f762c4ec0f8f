"""Plots draw the given points, bars and horizontal lines."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_speculation.cli.measure import Arm, arms_of
from mlx_speculation.cli.plots import check_plot, draw
from mlx_speculation.engine import Statistics
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.shell_commands import install_command


def arms() -> list[Arm]:
    """Return plain arms (110 and 55 tokens/s) and three arms for each of two drafts."""
    made = arms_of(["model", "lookup"], [None, 1, 4])
    for number, arm in enumerate(made[2:]):
        arm.speeds = [120.0 + number, 130.0 + number, 135.0 + number]
        reached = [9, 5][: arm.length] if arm.draft == 0 else [2]
        arm.totals = Statistics(drafts=10, reached=reached)
    made[0].speeds, made[1].speeds = [110.0], [50.0, 55.0, 60.0]
    return made


def points(line: Any) -> list[tuple[float, float]]:
    return [(round(x), y) for x, y in zip(*line.get_data(), strict=True)]


def test_measured_points_and_levels_stand_where_they_belong() -> None:
    figure = draw("one", ["model", "lookup"], arms())
    speeds, accepted = figure.axes
    assert speeds.get_title() == "one"
    containers: Any = speeds.containers
    (model, _, (bars,)), (lookup, _, _) = containers
    assert points(model) == [(5, 130), (1, 131), (4, 132)]  # x = 5: adaptive length
    assert [[y for _, y in each] for each in bars.get_segments()] == [
        [120, 135],
        [121, 136],
        [122, 137],
    ]
    assert points(lookup) == [(5, 133), (1, 134), (4, 135)]
    assert [each.get_text() for each in speeds.get_xticklabels()] == [*"1234", "auto"]
    assert speeds.get_ylim()[0] == 0
    drawn = [points(line) for line in speeds.lines]
    assert [(0, 110), (1, 110)] in drawn
    assert [(0, 55), (1, 55)] in drawn
    assert [points(line) for line in accepted.lines] == [[(1, 90), (2, 50)], [(1, 20)]]
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(shown) == ["lookup", "mlx-lm, plain", "model", "ours, plain"]
    colours = [line.get_color() for line in accepted.lines]
    assert colours == [model.get_color(), lookup.get_color()]
    assert len(set(colours)) == 2


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"'plot\.txt'.* ending .*png"):
        check_plot(tmp_path / "plot.txt")


def test_without_matplotlib_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['matplotlib.figure'] = None\n"
        "from mlx_speculation import errors\nfrom mlx_speculation.cli import plots\n"
        "try:\n    plots.check_plot('plot.png')\n"
        "except errors.MissingLibraryError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert install_command("plot") in done.stdout, done.stderr
