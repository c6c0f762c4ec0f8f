"""The command line `mlx-speculation`: options in, text, tables and JSON out.

Each command has a file in `commands/`. Commands import mlx only after they have chosen
the BLAS. This file imports almost nothing, so that it handles Ctrl-C while Python
imports the other modules, which takes a second.
"""

import os
import signal

TYPE_CHECKING = False  # `typing` would take longer to import than this module
if TYPE_CHECKING:
    import typer

__all__ = ["main", "run"]


def main() -> None:
    """Run the command line."""
    # A SIGINT that the parent process ignores stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    # transformers would say that there is no PyTorch; mlx-lm sets this too, but later.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    from mlx_speculation.cli.app import app

    run(app)


def run(app: "typer.Typer") -> None:
    """Run an application; errors of this package become one line and status 1 or 2."""
    from mlx_speculation.cli.run_app import run as run_application

    run_application(app)


def _leave(*_: object) -> None:
    """End the process at once."""
    os.write(2, b"interrupted\n")
    os._exit(130)
