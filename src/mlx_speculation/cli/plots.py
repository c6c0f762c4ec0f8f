"""Plots of a benchmark: tokens per second by draft length, acceptance by position."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_speculation.cli.measure import MLX_LM, OURS, Arm, Spread
from mlx_speculation.errors import InvalidRequestError, MissingLibraryError
from mlx_speculation.shell_commands import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Distinct in print and for most colour-blind readers (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKS = ("o", "s", "^", "D", "v", "P")
_PLAIN = {OURS: ("ours, plain", "-"), MLX_LM: ("mlx-lm, plain", "--")}
_SHIFT = 0.09  # keeps the bars of several drafts apart


def check_plot(path: str | Path) -> None:
    """Raise InvalidRequestError for an unknown picture format.

    Raise MissingLibraryError if matplotlib is not installed.
    """
    endings = _figure_class()().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in endings:
        raise InvalidRequestError(
            f"The name of the picture is {Path(path).name!r}, but its ending must be "
            f"one of {', '.join(sorted(endings))}."
        )


def draw(title: str, names: Sequence[str], arms: Sequence[Arm]) -> "Figure":
    """Return a figure: speeds above, acceptance below.

    `names[arm.draft]` is the name of an arm's draft. `arms` begins with the two plain
    arms.
    """
    figure: Figure = _figure_class()(figsize=(4.6, 7.1), layout="constrained")
    speeds, accepted = figure.subplots(2, 1, height_ratios=[3, 2])
    for arm in arms[:2]:
        label, dashes = _PLAIN[arm.name]
        level = Spread.of(arm.speeds)
        speeds.axhline(level.median, color="0.3", linestyle=dashes, label=label)
        speeds.axhspan(level.low, level.high, color="0.5", alpha=0.12, linewidth=0)
    adaptive = 1 + max(arm.length or 0 for arm in arms)  # abscissa of adaptive lengths
    for index, name in enumerate(names):
        style = {"color": _COLOURS[index % 6], "marker": _MARKS[index % 6]}
        ours = [arm for arm in arms[2:] if arm.draft == index]
        spreads = [Spread.of(arm.speeds) for arm in ours]
        speeds.errorbar(
            [(arm.length or adaptive) + _SHIFT * index for arm in ours],
            [each.median for each in spreads],
            yerr=[
                [each.median - each.low for each in spreads],
                [each.high - each.median for each in spreads],
            ],
            linestyle="none",
            label=name,
            **style,
        )
        shares = [100 * share for share in _accepted(ours)]
        accepted.plot(range(1, len(shares) + 1), shares, **style)
    speeds.set_title(title)
    speeds.set_xlabel("draft length")
    speeds.set_xticks(range(1, adaptive + 1), [*map(str, range(1, adaptive)), "auto"])
    speeds.set_ylabel("tokens per second, slowest to fastest pass")
    speeds.set_ylim(bottom=0)
    accepted.set_xlabel("position in the draft")
    accepted.set_ylabel("accepted, % of drafts")
    accepted.xaxis.get_major_locator().set_params(integer=True)
    accepted.set_ylim(0, 103)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _accepted(arms: Sequence[Arm]) -> Sequence[float]:
    """Return acceptance by position of the arm with the longest drafts.

    Of several such arms, one with a fixed length is taken.
    """
    counted = [
        (len(arm.totals.reached), arm.length is not None, arm.totals)
        for arm in arms
        if arm.totals is not None
    ]
    most = max(counted, key=lambda each: each[:2])[2]
    return most.accepted_per_position if most.drafts else ()


def _figure_class() -> Any:
    """Return matplotlib's `Figure`, which needs no window."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingLibraryError(
            "Plots need matplotlib, which is not installed. Install it with: "
            f"{install_command('plot')}"
        ) from error
    return Figure
