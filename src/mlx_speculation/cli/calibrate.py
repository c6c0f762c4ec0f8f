"""`calibrate`: measures what rounds cost."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mlx_speculation.blas import use_blas
from mlx_speculation.cli.options import Blas


def calibrate(
    model: Annotated[str, typer.Argument(help="Folder or repository of the target.")],
    draft: Annotated[
        str, typer.Option(help="As in `generate`; what is measured with the target.")
    ],
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens in the caches; by default 64. Repeatable."),
    ] = None,
    blas: Blas = "auto",
) -> None:
    """Measure what rounds cost here by draft length, and keep it for later runs."""
    report = Console(stderr=True)
    report.print(f"BLAS: {use_blas(blas).detail}", style="dim", highlight=False)
    from mlx_speculation import SpeculativeGenerator

    generator = SpeculativeGenerator.from_pretrained(model, draft=draft)
    with report.status("measuring"):
        costs = generator.calibrate(contexts=context or [64])
    lengths = sorted({length for table in costs.values() for length in table})
    table = Table(title="Milliseconds of a round by draft length")
    table.add_column("context up to")
    for length in lengths:
        table.add_column("plain" if length == 0 else str(length), justify="right")
    for bucket, seconds in costs.items():
        cells = [f"{seconds[n] * 1e3:.1f}" if n in seconds else "-" for n in lengths]
        table.add_row(f"{512 * 2**bucket}", *cells)
    Console().print(table)
