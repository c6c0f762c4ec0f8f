"""The command line, started by `python -m mlx_speculation`."""

from mlx_speculation.cli import main

main()
