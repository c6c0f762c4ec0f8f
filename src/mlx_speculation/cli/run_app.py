"""Running of commands: errors and signals become messages and exit statuses.

    cause                                standard error            status
    an error of this package             one line, "error: ..."    1
    mlx or a package of it is missing    one line, what to do      1
    wrong usage, an option that is out   typer's box, or one line  2
    of range or contradicts another
    Ctrl-C, SIGTERM                      one line, "interrupted"   130, 143
    a second one of these signals        nothing more              130, 143
    a closed pipe, as in `| head`        nothing                   141

Any other exception is a bug and keeps its traceback.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import typer

from mlx_speculation import signals
from mlx_speculation.environment import missing_backend
from mlx_speculation.errors import (
    ContextLengthNotice,
    CostFileWarning,
    DrafterFaultWarning,
    DraftNotice,
    InvalidRequestError,
    SpeculationError,
)

FAILED, USAGE, INTERRUPTED, READER_LEFT, TERMINATED = 1, 2, 130, 141, 143
_NOTES = (ContextLengthNotice, CostFileWarning, DrafterFaultWarning, DraftNotice)


def run(app: typer.Typer) -> None:
    """Run an application, and turn errors into a line and a status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # print unencodable characters as escapes
            stream.reconfigure(errors="backslashreplace")
    with _ending(SystemExit):
        try:
            app()
        except SystemExit as ended:
            if ended.code in (INTERRUPTED, TERMINATED):
                signals.end_within(signals.EXIT_SECONDS, ended.code)
            raise


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that turns errors and signals into a line and a status."""

    @wraps(command)
    def safe(**values: Any) -> None:
        try:
            with _ending(typer.Exit), signals.interruptible():
                command(**values)
        except typer.Exit as ended:
            if ended.exit_code == INTERRUPTED:
                ended.exit_code = signals.status()
            raise

    return safe


@contextmanager
def _ending(leave: Callable[[int], Exception | SystemExit]) -> Iterator[None]:
    with warnings.catch_warnings():
        theirs = warnings.showwarning

        def show(
            message: Any, category: type[Warning], *place: Any, **more: Any
        ) -> None:
            if issubclass(category, _NOTES):
                note(str(message))
            else:
                theirs(message, category, *place, **more)

        warnings.showwarning = show
        for category in _NOTES:
            warnings.simplefilter("default", category)
        try:
            yield
        except SpeculationError as error:
            fail(str(error))
            usage = isinstance(error, InvalidRequestError)
            raise leave(USAGE if usage else FAILED) from error
        except KeyboardInterrupt as error:
            typer.secho("interrupted", err=True)
            raise leave(INTERRUPTED) from error
        except BrokenPipeError as error:
            _drop_output()
            raise leave(READER_LEFT) from error
        except ImportError as error:
            if (said := missing_backend(error)) is None:
                raise
            fail(said)
            raise leave(FAILED) from error


def fail(message: str) -> None:
    """Print an error as one line."""
    typer.secho(f"error: {message}", err=True, fg=typer.colors.RED)


def note(message: str) -> None:
    """Print a note to the user as one line."""
    typer.secho(f"note: {message}", err=True, fg=typer.colors.YELLOW)


def _drop_output() -> None:
    """Redirect output to the null device, so that later flushes do not fail."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # no real file, as in a test
        return
