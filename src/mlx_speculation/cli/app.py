"""The application of all commands, each in a file of its own."""

import typer

from mlx_speculation.cli.commands.benchmark import benchmark
from mlx_speculation.cli.commands.calibrate import calibrate
from mlx_speculation.cli.commands.chat import chat
from mlx_speculation.cli.commands.check import check
from mlx_speculation.cli.commands.demo import demo
from mlx_speculation.cli.commands.doctor import doctor
from mlx_speculation.cli.commands.generate import generate
from mlx_speculation.cli.commands.pair import pair
from mlx_speculation.cli.commands.serve import serve
from mlx_speculation.cli.option_groups import flattened
from mlx_speculation.cli.run_app import guarded

app = typer.Typer(
    help="Faster text from mlx-lm models, and the same text.",
    no_args_is_help=True,
    add_completion=False,
)
COMMANDS = (generate, chat, serve, benchmark, check, calibrate, pair, doctor, demo)
for command in COMMANDS:
    app.command()(guarded(flattened(command)))
