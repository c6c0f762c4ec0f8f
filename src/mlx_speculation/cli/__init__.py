"""The command line `mlx-speculation`: options in, text, tables and JSON out.

Each command has a file in `commands/`. `app` lists them, `options` says what several
take, `load_pair` loads models, `console` shows results, and `run_app` turns
errors and Ctrl-C into exit codes. mlx is imported inside the commands only, after the
BLAS is chosen. This file imports next to nothing: the second in which Python reads the
others is one in which Ctrl-C may come too.
"""

import os
import signal

TYPE_CHECKING = False  # as typing's, which takes longer to load than this
if TYPE_CHECKING:
    import typer

__all__ = ["main", "run"]


def main() -> None:
    """Run the command line."""
    # Who has started us may have it ignored, as `nohup` does.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from mlx_speculation.cli.app import app

    run(app)


def run(app: "typer.Typer") -> None:
    """Run an application; errors of this package become one line and status 1."""
    from mlx_speculation.cli.run_app import run as run_application

    run_application(app)


def _leave(*_: object) -> None:
    """End before a command runs, or after it: no half-made import is left to fail."""
    os.write(2, b"interrupted\n")
    os._exit(130)
