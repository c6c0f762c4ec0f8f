"""`demo`: the bundled models with and without a draft."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from mlx_speculation.cli.console import Screen, number, percent
from mlx_speculation.cli.load_pair import as_object, begin
from mlx_speculation.cli.measure import Compared, parting_of
from mlx_speculation.cli.options import Blas, DraftLength, Json
from mlx_speculation.cli.run_app import FAILED, INTERRUPTED
from mlx_speculation.demo import (
    DEMO_TARGETS,
    DemoPrompt,
    demo_models,
    one_prompt_per_group,
)

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator


def demo(
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per run.")] = 128,
    draft_length: DraftLength = None,
    blas: Blas = "auto",
    json: Json = False,
) -> None:
    """Run the bundled models with and without a draft, and compare text and speed."""
    screen = Screen(json=json)
    begin(blas, screen)
    comparisons: list[_Comparison] = []
    interrupted = False
    try:
        for each in _compared(draft_length, max_tokens, screen):
            comparisons.append(each)
    except KeyboardInterrupt:
        if not comparisons:
            raise
        interrupted = True
        screen.say("interrupted: these are done")
    screen.table(_comparison_table(comparisons))
    screen.say(
        "Plain is the faster of mlx-lm's loop and ours. Single runs: "
        "`mlx-speculation benchmark` measures your own pair with repeats."
    )
    screen.object(
        command="demo",
        comparisons=[comparison.object for comparison in comparisons],
        interrupted=interrupted,
    )
    same = all(comparison.texts.same for comparison in comparisons)
    if interrupted or not same:
        raise typer.Exit(FAILED if not same else INTERRUPTED)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One prompt, continued by one target with and without its draft."""

    target: str
    group: str
    plain_speed: float
    texts: Compared

    @property
    def object(self) -> dict[str, Any]:
        """The comparison for JSON."""
        return {
            "target": self.target,
            "group": self.group,
            "text": self.texts.drafted.text,
            "plain_tokens_per_second": self.plain_speed,
            "same": self.texts.same,
            "parting": self.texts.parting,
            "statistics": as_object(self.texts.drafted.stats),
        }


def _compared(
    draft_length: int | None, max_tokens: int, screen: Screen
) -> Iterator[_Comparison]:
    """Yield the comparisons of all targets and groups of prompts."""
    from mlx_speculation import SpeculativeGenerator

    folders = demo_models()
    draft = folders["draft"]
    targets = {name: folders[name] for name in DEMO_TARGETS if name in folders}
    prompts = one_prompt_per_group()
    for name, path in targets.items():
        generator = SpeculativeGenerator.from_pretrained(
            path, draft=draft, draft_length=draft_length
        )
        if draft_length is None:
            with screen.busy(f"calibrating {name}"):
                generator.calibrate()
        for length in (0, None):
            generator.generate(prompts[0].text, max_tokens=8, draft_length=length)
        for prompt in prompts:
            if not screen.json:
                title = escape(f"{name}: {prompt.group}, from {prompt.source}")
                screen.out.rule(title)
            yield _compare(name, prompt, generator, max_tokens, screen)


def _compare(
    target: str,
    prompt: DemoPrompt,
    generator: "SpeculativeGenerator",
    max_tokens: int,
    screen: Screen,
) -> _Comparison:
    """Stream the speculative text, then generate the plain one and compare."""
    from mlx_speculation import Sampling
    from mlx_speculation.models import mlx_lm_speed

    stream = generator.stream(prompt.text, max_tokens=max_tokens, stop_tokens=())
    for chunk in stream:
        screen.text(chunk.text)
    screen.text("\n")
    result = stream.result
    plain = generator.generate(
        prompt.text, max_tokens=max_tokens, stop_tokens=(), draft_length=0
    )
    tokens = generator.encode(prompt.text)
    theirs = mlx_lm_speed(generator.model, tokens, max_tokens)
    parting = parting_of(generator, Sampling(seed=0), tokens, plain, result)
    speed = max(plain.stats.tokens_per_second, theirs)
    return _Comparison(target, prompt.group, speed, Compared(plain, result, parting))


def _comparison_table(comparisons: list[_Comparison]) -> Table:
    table = Table(title="Plain and speculative decoding, tokens per second")
    for column in ("target", "text"):
        table.add_column(column)
    for column in ("plain", "with draft", "ratio", "accepted", "accepted length"):
        table.add_column(column, justify="right")
    table.add_column("same tokens")
    for row in comparisons:
        stats, parting = row.texts.drafted.stats, row.texts.parting
        same = "yes"
        if parting is not None:
            same = f"[red]not at {parting.index}[/red]"
            if parting.near_tie:
                same = f"near-tie at {parting.index}"
        table.add_row(
            row.target,
            row.group,
            number(row.plain_speed),
            number(stats.tokens_per_second),
            number(stats.tokens_per_second / row.plain_speed),
            percent(stats.acceptance_rate),
            number(stats.mean_accepted_length),
            same,
        )
    return table
