"""Running an application of typer, so that errors end it as a user expects."""

import typer

from mlx_speculation.errors import SpeculationError


def run(app: typer.Typer) -> None:
    """Run an application; errors of this package become one line and status 1."""
    try:
        app()
    except SpeculationError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(1) from error
