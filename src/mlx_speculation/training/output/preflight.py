"""Preflight: a trial of the outputs of a training before it begins."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from mlx_speculation.environment import machine, versions
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.training.acceptance_check import Acceptance
from mlx_speculation.training.output.curves import draw_curves
from mlx_speculation.training.state import Progress


def try_outputs(folder: Path, say: Callable[[str], None]) -> None:
    """Write a file to the draft's folder, describe the machine, and draw a plot.

    If the plot cannot be drawn a notice says so, and the training goes on.

    Raises:
        InvalidRequestError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".trial-") as trial:
            trial.write(b"trial")
            trial.flush()
    except OSError as error:
        raise InvalidRequestError(
            f"{str(folder)!r} cannot be written ({error.strerror}). Name another "
            "folder for the draft."
        ) from error
    machine()
    versions()
    with tempfile.TemporaryDirectory() as other:
        drawn(Path(other) / "trial.png", Progress(1, 1, []), {}, say)


def drawn(
    file: Path,
    progress: Progress,
    lookup: Mapping[str, Acceptance],
    say: Callable[[str], None],
) -> None:
    """Draw the plot; report a failure with `say` instead of raising it."""
    try:
        draw_curves(file, progress, lookup)
    except Exception as error:  # any error of matplotlib; the plot is not essential
        say(f"training.png cannot be drawn: {type(error).__name__}: {error}")
