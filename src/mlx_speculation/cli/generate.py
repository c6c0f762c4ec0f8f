"""`generate`: continues a prompt."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlx_speculation.blas import use_blas
from mlx_speculation.cli.options import Blas, DraftLength
from mlx_speculation.cli.tables import number, percent


def generate(
    model: Annotated[str, typer.Argument(help="Folder or repository of the target.")],
    draft: Annotated[
        str | None,
        typer.Option(
            help="Folder or repository of a draft, 'mtp', 'lookup', or 'auto' for what "
            "the target's folder offers."
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="The text to continue; by default, standard input."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="0: off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    draft_length: DraftLength = None,
    quantize_draft: Annotated[
        int | None,
        typer.Option(help="Hold the draft's weights in 2, 3, 4, 5, 6 or 8 bits."),
    ] = None,
    blas: Blas = "auto",
) -> None:
    """Continue a prompt; text on standard output, statistics on standard error."""
    text = _read_prompt(prompt)
    report = Console(stderr=True)
    report.print(f"BLAS: {use_blas(blas).detail}", style="dim", highlight=False)
    from mlx_speculation import Sampling, SpeculativeGenerator

    generator = SpeculativeGenerator.from_pretrained(
        model, draft=draft, draft_length=draft_length, quantize_draft=quantize_draft
    )
    stream = generator.stream(
        text,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
    )
    for chunk in stream:
        typer.echo(chunk.text, nl=False)
    typer.echo()
    stats = stream.result.stats
    table = Table("statistic", "value", title="Statistics")
    table.add_row("tokens", str(len(stream.result.tokens)))
    table.add_row("finish reason", str(stream.result.finish_reason))
    table.add_row("tokens per second", number(stats.tokens_per_second))
    for name in ("rounds", "drafts", "drafted", "accepted"):
        table.add_row(name, str(getattr(stats, name)))
    table.add_row("acceptance rate", percent(stats.acceptance_rate))
    table.add_row("mean accepted length", number(stats.mean_accepted_length))
    table.add_row(
        "accepted per position", " ".join(map(percent, stats.accepted_per_position))
    )
    for fault in stats.drafter_faults:
        table.add_row(f"{fault.drafter} set aside", escape(fault.reason))
    report.print(table)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise typer.BadParameter("give --prompt, or a text on standard input")
    return sys.stdin.read()
