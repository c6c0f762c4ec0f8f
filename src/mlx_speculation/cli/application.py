"""The application of all commands, each in a file of its own."""

import typer

from mlx_speculation.cli.benchmark import benchmark
from mlx_speculation.cli.calibrate import calibrate
from mlx_speculation.cli.chat import chat
from mlx_speculation.cli.check import check
from mlx_speculation.cli.demo import demo
from mlx_speculation.cli.doctor import doctor
from mlx_speculation.cli.generate import generate
from mlx_speculation.cli.groups import flattened
from mlx_speculation.cli.pair import pair
from mlx_speculation.cli.running import guarded, run
from mlx_speculation.cli.serve import serve

app = typer.Typer(
    help="Faster text from mlx-lm models, and the same text.",
    no_args_is_help=True,
    add_completion=False,
)
COMMANDS = (generate, chat, serve, benchmark, check, calibrate, pair, doctor, demo)
for command in COMMANDS:
    app.command()(guarded(flattened(command)))


def main() -> None:
    """Run the command line."""
    run(app)
