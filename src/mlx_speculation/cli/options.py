"""Options that several commands share."""

from typing import Annotated

import typer

from mlx_speculation.blas import BlasName

Blas = Annotated[
    BlasName,
    typer.Option(help="What multiplies float32 matrices on a Linux CPU."),
]
DraftLength = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Tokens drafted per round; 0 is plain decoding. By default as many as pay "
        "here, by measurement.",
    ),
]
