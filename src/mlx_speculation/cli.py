"""The command line: `mlx-speculation` with `generate`, `calibrate` and `demo`.

Thin: options in, text and tables out. mlx is imported inside the commands only,
after the BLAS is chosen.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.demo import DEMO_TARGETS, DemoPrompt, demo_models, demo_prompts
from mlx_speculation.errors import SpeculationError

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine import Statistics
    from mlx_speculation.engine.identity import Parting

app = typer.Typer(
    help="Faster text from mlx-lm models, and the same text.",
    no_args_is_help=True,
    add_completion=False,
)

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


def main() -> None:
    """Run the command line."""
    run(app)


def run(app: typer.Typer) -> None:
    """Run an application; errors of this package become one line and status 1."""
    try:
        app()
    except SpeculationError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(1) from error


@app.command()
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
    table.add_row("tokens per second", _number(stats.tokens_per_second))
    for name in ("rounds", "drafts", "drafted", "accepted"):
        table.add_row(name, str(getattr(stats, name)))
    table.add_row("acceptance rate", _percent(stats.acceptance_rate))
    table.add_row("mean accepted length", _number(stats.mean_accepted_length))
    table.add_row(
        "accepted per position", " ".join(map(_percent, stats.accepted_per_position))
    )
    for fault in stats.drafter_faults:
        table.add_row(f"{fault.drafter} set aside", escape(fault.reason))
    report.print(table)


@app.command()
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


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    draft_length: DraftLength = None,
    blas: Blas = "auto",
) -> None:
    """Run the bundled models with and without a draft, and compare text and speed."""
    console = Console()
    console.print(f"BLAS: {use_blas(blas).detail}", style="dim", highlight=False)
    from mlx_speculation import SpeculativeGenerator

    folders = demo_models()
    draft = folders["draft"]
    targets = {name: folders[name] for name in DEMO_TARGETS if name in folders}
    prompts = _one_per_group(demo_prompts())
    comparisons = []
    for name, path in targets.items():
        generator = SpeculativeGenerator.from_pretrained(
            path, draft=draft, draft_length=draft_length
        )
        if draft_length is None:
            generator.calibrate()
        for length in (0, None):
            generator.generate(prompts[0].text, max_tokens=8, draft_length=length)
        for prompt in prompts:
            console.rule(escape(f"{name}: {prompt.group}, from {prompt.source}"))
            comparisons.append(_compare(name, prompt, generator, max_tokens))
    console.print(_comparison_table(comparisons))
    console.print(
        "Plain is the faster of mlx-lm's loop and ours. Single runs: "
        "scripts/benchmark.py measures with repeats.",
        style="dim",
    )
    if not all(comparison.same for comparison in comparisons):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One prompt, continued by one target with and without its draft."""

    target: str
    group: str
    plain_speed: float
    stats: "Statistics"
    parting: "Parting | None"

    @property
    def same(self) -> bool:
        """Whether the texts are equal, or part where rounding decides."""
        return self.parting is None or self.parting.near_tie

    @property
    def verdict(self) -> str:
        """What the table says about the texts."""
        if self.parting is None:
            return "yes"
        if self.parting.near_tie:
            return f"near-tie at {self.parting.index}"
        return f"[red]not at {self.parting.index}[/red]"


def _compare(
    target: str, prompt: DemoPrompt, generator: "SpeculativeGenerator", max_tokens: int
) -> _Comparison:
    """Stream the speculative text, then generate the plain one and compare."""
    from mlx_speculation import Sampling
    from mlx_speculation.engine.identity import find_parting
    from mlx_speculation.models import TokenIds, mlx_lm_speed
    from mlx_speculation.samplers import Chooser

    stream = generator.stream(prompt.text, max_tokens=max_tokens, stop_tokens=())
    for chunk in stream:
        typer.echo(chunk.text, nl=False)
    typer.echo()
    result = stream.result
    plain = generator.generate(
        prompt.text, max_tokens=max_tokens, stop_tokens=(), draft_length=0
    )
    tokens = generator.tokenizer.encode(prompt.text)
    theirs = mlx_lm_speed(generator.model, tokens, max_tokens)
    return _Comparison(
        target=target,
        group=prompt.group,
        plain_speed=max(plain.stats.tokens_per_second, theirs),
        stats=result.stats,
        parting=find_parting(
            generator.model,
            Chooser(Sampling(seed=0), TokenIds.of(generator.tokenizer).width),
            tokens,
            plain.tokens,
            result.tokens,
            width=1 + len(result.stats.reached),
        ),
    )


def _comparison_table(comparisons: list[_Comparison]) -> Table:
    table = Table(title="Plain and speculative decoding, tokens per second")
    for column in ("target", "text"):
        table.add_column(column)
    for column in ("plain", "with draft", "ratio", "accepted", "accepted length"):
        table.add_column(column, justify="right")
    table.add_column("same tokens")
    for row in comparisons:
        table.add_row(
            row.target,
            row.group,
            _number(row.plain_speed),
            _number(row.stats.tokens_per_second),
            _number(row.stats.tokens_per_second / row.plain_speed),
            _percent(row.stats.acceptance_rate),
            _number(row.stats.mean_accepted_length),
            row.verdict,
        )
    return table


def _one_per_group(prompts: Iterable[DemoPrompt]) -> list[DemoPrompt]:
    """Keep the first prompt of each group."""
    first: dict[str, DemoPrompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.group, prompt)
    return list(first.values())


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise typer.BadParameter("give --prompt, or a text on standard input")
    return sys.stdin.read()


def _number(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"
