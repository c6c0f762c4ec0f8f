"""`python -m mlx_speculation` is the command line."""

from mlx_speculation.cli import main

main()
