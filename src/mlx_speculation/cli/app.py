"""The application of all commands, each in a file of its own."""

from collections.abc import Callable
from typing import Annotated

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
from mlx_speculation.cli.commands.train import train
from mlx_speculation.cli.option_groups import flattened
from mlx_speculation.cli.run_app import guarded


def _version(wanted: bool) -> None:
    if wanted:
        from mlx_speculation import __version__

        typer.echo(f"mlx-speculation {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Take what stands before a command."""


app = typer.Typer(
    help="Faster text from mlx-lm models, and the same text.",
    no_args_is_help=True,
    add_completion=False,
)
app.callback(help=app.info.help)(_common)
COMMANDS = (
    generate,
    chat,
    serve,
    benchmark,
    check,
    calibrate,
    pair,
    train,
    doctor,
    demo,
)


def _help(command: Callable[..., None]) -> str:
    """Return a docstring with a line for each paragraph, for a terminal to wrap."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


for command in COMMANDS:
    app.command(help=_help(command))(guarded(flattened(command)))
