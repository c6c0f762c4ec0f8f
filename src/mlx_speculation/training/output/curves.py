"""The plot of a training: its loss, and the accepted length on held-out text."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from mlx_speculation.training.acceptance_check import ROUND, Acceptance
from mlx_speculation.training.state import Progress

PLOT = "training.png"
_COLOURS = {"greedy": "#1f77b4", "sampled": "#d62728"}


def draw_curves(
    file: Path,
    progress: Progress,
    lookup: Mapping[str, Acceptance],
    say: Callable[[str], None],
) -> None:
    """Draw the plot, if matplotlib is installed.

    The file's extension gives the format. `lookup`: acceptance of prompt lookup on the
    same text. If the plot cannot be drawn, `say` gets the reason; nothing is raised.
    """
    if find_spec("matplotlib") is None:
        return
    try:
        _draw(file, progress, lookup)
    except Exception as error:  # any error of matplotlib; the plot is not essential
        say(f"training.png cannot be drawn: {type(error).__name__}: {error}")


def _draw(file: Path, progress: Progress, lookup: Mapping[str, Acceptance]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    if progress.losses:
        left.plot(*zip(*progress.losses, strict=True), color="0.3", linewidth=1)
    left.set_xlabel("step")
    left.set_ylabel("loss")
    steps = [each["step"] for each in progress.history]
    for name, colour in _COLOURS.items():
        points = [each["acceptance"].get(name) for each in progress.history]
        lengths = [each["length"] for each in points if each is not None]
        if len(lengths) == len(steps):
            right.plot(
                steps, lengths, color=colour, marker="o", markersize=3, label=name
            )
        if name in lookup:
            right.axhline(
                lookup[name].length,
                color=colour,
                linestyle=":",
                label=f"{name}, lookup",
            )
    right.set_xlabel("step")
    right.set_ylabel(f"mean accepted length, {ROUND} drafted tokens")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)
