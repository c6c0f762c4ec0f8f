"""The command line `mlx-speculation`: options in, text, tables and JSON out.

Each command has a file. mlx is imported inside the commands only, after the BLAS is
chosen.
"""

from mlx_speculation.cli.application import app, main
from mlx_speculation.cli.running import run

__all__ = ["app", "main", "run"]
