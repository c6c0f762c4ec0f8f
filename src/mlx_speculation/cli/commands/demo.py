"""`demo`: the bundled models, or a published one, with and without a draft."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    chat_prompts,
    demo_models,
    one_prompt_per_group,
)
from mlx_speculation.demo.smollm2 import smollm2_folder, smollm2_head
from mlx_speculation.errors import DemoModelsMissingError

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator

CHATS = ("question", "summary", "code")  # of the bundled messages


def demo(
    model: Annotated[
        Literal["bundled", "smollm2", "auto"],
        typer.Option(
            help="The small bundled models; SmolLM2-135M-Instruct, which is fetched "
            "once; or that one where it can be had."
        ),
    ] = "bundled",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per run.")] = 128,
    draft_length: DraftLength = None,
    blas: Blas = "auto",
    json: Json = False,
) -> None:
    """Run the demo models with and without a draft, and compare text and speed."""
    screen = Screen(json=json)
    begin(blas, screen)
    folder = None if model == "bundled" else _fetched(screen, needed=model != "auto")
    if folder is None:
        found = _compared(draft_length, max_tokens, screen)
    else:
        found = _compared_chats(folder, draft_length, max_tokens, screen)
    comparisons: list[_Comparison] = []
    interrupted = False
    try:
        for each in found:
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
    """One prompt, continued by one target with and without a draft."""

    target: str
    draft: str
    group: str
    plain_speed: float
    texts: Compared

    @property
    def object(self) -> dict[str, Any]:
        """The comparison for JSON."""
        return {
            "target": self.target,
            "draft": self.draft,
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
        first = generator.encode(prompts[0].text)
        _warm({name: generator}, draft_length, first, screen)
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
    with screen.text_line():
        for chunk in stream:
            screen.text(chunk.text)
    result = stream.result
    plain = generator.generate(
        prompt.text, max_tokens=max_tokens, stop_tokens=(), draft_length=0
    )
    tokens = generator.encode(prompt.text)
    theirs = mlx_lm_speed(generator.model, tokens, max_tokens)
    parting = parting_of(generator, Sampling(seed=0), tokens, plain, result)
    speed = max(plain.stats.tokens_per_second, theirs)
    texts = Compared(plain, result, parting)
    return _Comparison(target, "draft", prompt.group, speed, texts)


def _fetched(screen: Screen, *, needed: bool) -> Path | None:
    """Return the folder of SmolLM2; None where it cannot be had and is not needed."""
    try:
        return smollm2_folder(screen.say)
    except DemoModelsMissingError as error:
        if needed:
            raise
        screen.say(f"{error} The bundled models are shown.")
        return None


def _compared_chats(
    folder: Path, draft_length: int | None, max_tokens: int, screen: Screen
) -> Iterator[_Comparison]:
    """Yield the comparisons of chats with one model, each with all of its drafts."""
    import mlx.core as mx

    from mlx_speculation import Sampling, SpeculativeGenerator
    from mlx_speculation.models import load, mlx_lm_speed

    model, tokenizer = load(folder)
    if mx.default_device() == mx.cpu:  # where bfloat16 is slow
        model.set_dtype(mx.float32)
    head = smollm2_head()
    drafts = {"lookup": "lookup"} | ({} if head is None else {"eagle": str(head)})
    generators = {
        name: SpeculativeGenerator(
            model, tokenizer, draft=draft, draft_length=draft_length
        )
        for name, draft in drafts.items()
    }
    chats = [prompt for prompt in chat_prompts() if prompt.group in CHATS]
    _warm(generators, draft_length, _chat(tokenizer, chats[0]), screen)
    for chat in chats:
        tokens = _chat(tokenizer, chat)
        plain = None
        for name, generator in generators.items():
            if not screen.json:
                screen.out.rule(escape(f"smollm2 with {name}: {chat.group}"))
            stream = generator.stream(tokens, max_tokens=max_tokens)
            with screen.text_line():
                for chunk in stream:
                    screen.text(chunk.text)
            result = stream.result
            if plain is None:
                plain = generator.generate(
                    tokens, max_tokens=max_tokens, draft_length=0
                )
                theirs = mlx_lm_speed(model, tokens, len(plain.tokens))
            parting = parting_of(generator, Sampling(seed=0), tokens, plain, result)
            speed = max(plain.stats.tokens_per_second, theirs)
            texts = Compared(plain, result, parting)
            yield _Comparison("smollm2", name, chat.group, speed, texts)


def _chat(tokenizer: Any, prompt: DemoPrompt) -> list[int]:
    """Return the ids of a chat that begins with a prompt."""
    messages = [{"role": "user", "content": prompt.text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return list(ids)


def _warm(
    generators: "dict[str, SpeculativeGenerator]",
    draft_length: int | None,
    tokens: Sequence[int],
    screen: Screen,
) -> None:
    """Measure what rounds cost, and run each way to decode once."""
    for name, generator in generators.items():
        if draft_length is None:
            with screen.busy(f"calibrating {name}"):
                generator.calibrate()
        for length in (0, None):
            generator.generate(list(tokens), max_tokens=8, draft_length=length)


def _comparison_table(comparisons: list[_Comparison]) -> Table:
    table = Table(title="Plain and speculative decoding, tokens per second")
    chats = any(row.draft != "draft" for row in comparisons)
    for column in ("draft" if chats else "target", "text"):
        table.add_column(column, no_wrap=True)
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
            row.draft if chats else row.target,
            row.group,
            number(row.plain_speed),
            number(stats.tokens_per_second),
            number(stats.tokens_per_second / row.plain_speed),
            percent(stats.acceptance_rate),
            number(stats.mean_accepted_length),
            same,
        )
    return table
