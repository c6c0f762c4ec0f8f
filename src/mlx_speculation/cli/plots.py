"""Plots of a comparison: tokens per second by draft length, acceptance by position.

This module does not import mlx. matplotlib, of the extra "plot", is imported when a
picture is drawn or checked. A panel shows one benchmark; each drafter is a curve:

    measured    tokens per second at fixed draft lengths, with their spread
    adaptive    tokens per second at the adaptive draft length, drawn at the right
    accepted    the share of drafts in which position i was accepted
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_speculation.cli.measure import Spread
from mlx_speculation.errors import InvalidRequestError, MissingLibraryError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinct in print and for most colour-blind readers (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKS = ("o", "s", "^", "D", "v", "P")
# Styles of the horizontal lines of plain decoding and of other programs.
_PLAIN = {"color": "0.1", "linewidth": 1.2}
_OTHERS = ((0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (10, 3)), (0, (4, 1, 1, 1, 1, 1)))


@dataclass(frozen=True, slots=True)
class Curve:
    """One drafter."""

    name: str  # in the legend
    measured: Mapping[int, Spread]  # tokens per second by fixed draft length, in order
    # Tokens per second at the adaptive draft length; None: not measured.
    adaptive: Spread | None
    # The share of drafts in which position i was accepted, from 0 to 1.
    accepted: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """The figures of a benchmark."""

    title: str  # above the panel
    plain: Spread  # tokens per second of plain decoding
    curves: Sequence[Curve]  # one for each drafter
    others: Mapping[str, Spread]  # tokens per second of other programs, by name


def check_plot(path: str | Path) -> None:
    """Refuse a picture that could not be drawn; called before the measurement.

    Raises:
        InvalidRequestError: the extension of `path` is not one of a picture.
        MissingLibraryError: matplotlib is not installed.
    """
    endings = _figure_class()().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in endings:
        raise InvalidRequestError(
            f"The picture is to be {Path(path).name!r}, and its ending has to be one "
            f"of {', '.join(sorted(endings))}."
        )


def save_plot(panel: Panel, path: str | Path) -> None:
    """Draw a panel; the extension of `path` decides the format."""
    check_plot(path)
    draw(panel).savefig(path, dpi=130)


def draw(panel: Panel) -> "Figure":
    """Return a figure of two axes, one above the other."""
    figure: Figure = _figure_class()(figsize=(4.6, 7.1))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    above, below = figure.subplots(2, 1, height_ratios=[3, 2])
    styles = _styles(panel)
    _draw_speeds(above, panel, styles)
    _draw_acceptance(below, panel, styles)
    figure.legend(
        handles=_legend(styles), loc="outside lower center", ncols=2, frameon=False
    )
    return figure


def _figure_class() -> Any:
    """Return matplotlib's `Figure`; unlike pyplot it has no window or global state."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingLibraryError(
            "Plots need matplotlib, which is not installed. Install it with: "
            "pip install 'mlx-speculation[plot]'"
        ) from error
    return Figure


def _styles(panel: Panel) -> dict[str, dict[str, Any]]:
    """Return the colour, marker and line style of each name."""
    styles: dict[str, dict[str, Any]] = {
        curve.name: {"color": _COLOURS[index % 6], "marker": _MARKS[index % 6]}
        for index, curve in enumerate(panel.curves)
    }
    styles["plain"] = _PLAIN
    for index, name in enumerate(panel.others):
        dashes = _OTHERS[index % len(_OTHERS)]
        styles[name] = {"color": "0.4", "linewidth": 1.2, "linestyle": dashes}
    return styles


def _draw_speeds(axes: "Axes", panel: Panel, styles: Mapping[str, Any]) -> None:
    """Draw speeds as points with bars, and plain decoding and others as lines."""
    longest = max([n for curve in panel.curves for n in curve.measured] + [1])
    for name, level in {"plain": panel.plain, **panel.others}.items():
        axes.axhline(level.median, **styles[name])
        axes.axhspan(level.low, level.high, color="0.5", alpha=0.12, linewidth=0)
    shift = 0.09  # keeps the bars of several drafters apart
    for index, curve in enumerate(panel.curves):
        style = styles[curve.name]
        offset = shift * (index - (len(panel.curves) - 1) / 2)
        speeds = list(curve.measured.values())
        places = [length + offset for length in curve.measured]
        _draw_bars(axes, places, speeds, markersize=5, **style)
        if curve.adaptive is not None:
            edge = {"markersize": 9, "markeredgecolor": "black"}
            _draw_bars(axes, [longest + 1 + offset], [curve.adaptive], **edge, **style)
    axes.axvline(longest + 0.5, color="0.85", linewidth=1)
    axes.set_xticks(
        [*range(longest + 1), longest + 1], [*map(str, range(longest + 1)), "auto"]
    )
    axes.set_xlim(-0.4, longest + 1.5)
    ends = [speed.high for each in panel.curves for speed in _speeds(each)]
    levels = [each.high for each in (panel.plain, *panel.others.values())]
    axes.set_ylim(0, 1.08 * max(*ends, *levels))
    axes.set_title(panel.title, fontsize=11)
    axes.set_xlabel("draft length")
    axes.set_ylabel("tokens per second")


def _speeds(curve: Curve) -> list[Spread]:
    return [*curve.measured.values(), *([curve.adaptive] if curve.adaptive else [])]


def _draw_bars(
    axes: "Axes", places: Sequence[float], speeds: Sequence[Spread], **style: Any
) -> None:
    """Draw medians, and bars from the slowest to the fastest pass."""
    axes.errorbar(
        places,
        [speed.median for speed in speeds],
        yerr=[
            [speed.median - speed.low for speed in speeds],
            [speed.high - speed.median for speed in speeds],
        ],
        linestyle="none",
        elinewidth=1,
        **style,
    )


def _draw_acceptance(axes: "Axes", panel: Panel, styles: Mapping[str, Any]) -> None:
    """Draw the share of drafts in which each position was accepted."""
    longest = max([len(curve.accepted) for curve in panel.curves] + [1])
    for curve in panel.curves:
        positions = range(1, len(curve.accepted) + 1)
        shares = [100 * share for share in curve.accepted]
        axes.plot(positions, shares, linewidth=1.2, markersize=4, **styles[curve.name])
    axes.set_xticks(range(1, longest + 1))
    axes.set_ylim(0, 103)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, % of drafts")
    axes.grid(axis="y", color="0.9")


def _legend(styles: Mapping[str, Any]) -> list[Any]:
    """Return the legend's entries: drafters, horizontal lines, and the bars."""
    from matplotlib.lines import Line2D

    shown = [Line2D([], [], label=name, **style) for name, style in styles.items()]
    spread = "bars and bands: slowest to fastest pass"
    shown.append(Line2D([], [], linestyle="none", label=spread))
    return shown
