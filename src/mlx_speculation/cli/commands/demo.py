"""`demo`: a published model, or the bundled ones, with and without drafts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from mlx_speculation.cli.console import Screen, number
from mlx_speculation.cli.load_pair import CacheOptions, as_object, begin
from mlx_speculation.cli.measure import Compared, parting_of
from mlx_speculation.cli.options import Blas, DraftLength, Json
from mlx_speculation.cli.run_app import FAILED, INTERRUPTED
from mlx_speculation.demo import (
    DEMO_TARGETS,
    Story,
    chat_stories,
    demo_models,
    one_prompt_per_group,
)
from mlx_speculation.demo.smollm2 import smollm2_folder, smollm2_head
from mlx_speculation.errors import DemoModelsMissingError

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine.options import GeneratorKeywords

CACHE_GIGABYTES = 1.0
ADVICE = """\
tokens reused: prompt tokens kept from earlier prompts, which are not read again

This model is small. Others report 1.4 to 2.2 times plain decoding for one of 9 B on an
M4 Pro (mlx-dspark, code, by quantization). On yours:
  mlx-speculation chat MODEL
  mlx-speculation report MODEL
"""


def demo(
    model: Annotated[
        Literal["bundled", "smollm2", "auto"],
        typer.Option(
            help="The small bundled models; SmolLM2-135M-Instruct, which is fetched "
            "once; or that one where it can be had."
        ),
    ] = "bundled",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    draft_length: DraftLength = None,
    blas: Blas = "auto",
    json: Json = False,
) -> None:
    """Run the demo models with and without drafts, and compare text and speed."""
    screen = Screen(json=json)
    begin(blas, screen)
    folder = None if model == "bundled" else _fetched(screen, needed=model != "auto")
    started = (
        _bundled(draft_length, max_tokens, screen)
        if folder is None
        else _published(folder, draft_length, max_tokens, screen)
    )
    comparisons: list[_Comparison] = []
    interrupted = False
    try:
        comparisons.extend(started)
    except KeyboardInterrupt:
        if not comparisons:
            raise
        interrupted = True
        screen.say("interrupted: these are done")
    screen.table(_table(comparisons))
    screen.text(ADVICE)
    screen.object(
        command="demo",
        comparisons=[comparison.object for comparison in comparisons],
        interrupted=interrupted,
    )
    same = all(comparison.same for comparison in comparisons)
    if interrupted or not same:
        raise typer.Exit(FAILED if not same else INTERRUPTED)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One story, told by one target with and without drafts.

    Attributes:
        turns: one for each answer.
    """

    target: str
    story: str
    turns: list[Compared] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Return whether all texts are equal, or part where rounding decides."""
        return all(turn.same for turn in self.turns)

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens per second of plain decoding, and with drafts."""
        plain = [turn.plain.stats for turn in self.turns]
        drafted = [turn.drafted.stats for turn in self.turns]
        both = [
            sum(each.emitted for each in stats)
            / max(sum(each.decode_seconds for each in stats), 1e-9)
            for stats in (plain, drafted)
        ]
        return both[0], both[1]

    @property
    def object(self) -> dict[str, Any]:
        """The comparison for JSON."""
        plain, drafted = self.speeds
        return {
            "target": self.target,
            "story": self.story,
            "texts": [turn.drafted.text for turn in self.turns],
            "plain_tokens_per_second": plain,
            "tokens_per_second": drafted,
            "same": self.same,
            "partings": [turn.parting for turn in self.turns],
            "statistics": [as_object(turn.drafted.stats) for turn in self.turns],
        }


def _bundled(
    draft_length: int | None, max_tokens: int, screen: Screen
) -> Iterator[_Comparison]:
    """Yield the comparisons of the bundled targets with the bundled draft model."""
    from mlx_speculation import load

    folders = demo_models()
    prompts = one_prompt_per_group()
    for name in (name for name in DEMO_TARGETS if name in folders):
        model, tokenizer = load(folders[name])
        options: GeneratorKeywords = {"draft": folders["draft"]}
        teller = _Teller(
            name, model, tokenizer, options, max_tokens, screen, chat=False
        )
        teller.warm(draft_length, prompts[0].text)
        for prompt in prompts:
            yield teller.compare(Story(prompt.group, [prompt.text]))


def _published(
    folder: Path, draft_length: int | None, max_tokens: int, screen: Screen
) -> Iterator[_Comparison]:
    """Yield the comparisons of a chat model.

    It drafts as with "auto", if its folder offered the bundled head.
    """
    import mlx.core as mx

    from mlx_speculation import CascadeDraft
    from mlx_speculation.models import load

    model, tokenizer = load(folder)
    if mx.default_device() == mx.cpu:  # where bfloat16 is slow
        model.set_dtype(mx.float32)
    head = smollm2_head()
    drafts = "auto" if head is None else CascadeDraft(str(head), "lookup")
    options: GeneratorKeywords = {"draft": drafts}
    teller = _Teller(
        "smollm2", model, tokenizer, options, max_tokens, screen, chat=True
    )
    stories = chat_stories()
    teller.warm(draft_length, stories[0].turns[0])
    for story in stories:
        yield teller.compare(story)


class _Teller:
    """One target that tells stories with and without drafts.

    Both ways have a prefix cache of their own.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        options: "GeneratorKeywords",
        max_tokens: int,
        screen: Screen,
        *,
        chat: bool,
    ) -> None:
        from mlx_speculation import SpeculativeGenerator

        def make(**more: Any) -> "SpeculativeGenerator":
            cache = CacheOptions(cache_gigabytes=CACHE_GIGABYTES).made()
            return SpeculativeGenerator(model, tokenizer, prefix_cache=cache, **more)

        self._name, self._screen, self._chat = name, screen, chat
        self._plain, self._drafted = make(), make(**options)
        self._max_tokens = max_tokens
        self._draft_length: int | None = None

    def warm(self, draft_length: int | None, text: str) -> None:
        """Measure what rounds cost, and run each way to decode once."""
        self._draft_length = draft_length
        if draft_length is None:
            with self._screen.busy(f"calibrating {self._name}"):
                self._drafted.calibrate()
        for generator in (self._plain, self._drafted):
            generator.generate(text[:200], max_tokens=8, draft_length=draft_length)

    def compare(self, story: Story) -> _Comparison:
        """Stream each answer with drafts, then generate the plain one."""
        screen, compared = self._screen, _Comparison(self._name, story.name)
        messages: list[dict[str, str]] = []
        if story.system is not None:
            messages.append({"role": "system", "content": story.system})
        for place, turn in enumerate(story.turns, 1):
            if not screen.json:
                self._announce(story, place)
            messages.append({"role": "user", "content": turn})
            tokens = self._tokens(messages)
            one = self._answer(tokens, story.prediction)
            messages.append({"role": "assistant", "content": one.drafted.text})
            compared.turns.append(one)
        return compared

    def _announce(self, story: Story, place: int) -> None:
        """Print which text comes next."""
        about = f": {story.about}" if story.about else ""
        turns = len(story.turns)
        turn = f" ({place} of {turns})" if turns > 1 else ""
        self._screen.out.rule(escape(f"{self._name}: {story.name}{about}{turn}"))

    def _tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the ids of a chat, or of the only text."""
        generator = self._drafted
        if not self._chat:
            return generator.encode(messages[-1]["content"])
        made = generator.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True
        )
        return list(made)

    def _answer(self, tokens: list[int], prediction: str | None) -> Compared:
        """Return one answer, decoded both ways."""
        from mlx_speculation import Sampling

        stops: dict[str, Any] = {} if self._chat else {"stop_tokens": ()}
        stream = self._drafted.stream(
            tokens,
            max_tokens=self._max_tokens,
            draft_length=self._draft_length,
            prediction=prediction,
            **stops,
        )
        with self._screen.text_line():
            for chunk in stream:
                self._screen.text(chunk.text)
        drafted = stream.result
        with self._screen.busy("the same without drafts"):
            plain = self._plain.generate(tokens, max_tokens=self._max_tokens, **stops)
        seconds = [
            stats.prefill_seconds + stats.decode_seconds
            for stats in (drafted.stats, plain.stats)
        ]
        self._screen.say("{:.1f} s with drafts, {:.1f} s without".format(*seconds))
        sampling = Sampling(seed=0)
        parting = parting_of(self._plain, sampling, tokens, plain, drafted)
        return Compared(plain, drafted, parting)


def _fetched(screen: Screen, *, needed: bool) -> Path | None:
    """Return the folder of SmolLM2; None where it cannot be had and is not needed."""
    try:
        return smollm2_folder(screen.say)
    except DemoModelsMissingError as error:
        if needed:
            raise
        screen.say(f"{error} The bundled models are shown.")
        return None


def _table(comparisons: Sequence[_Comparison]) -> Table:
    table = Table(title="Plain decoding and decoding with drafts, tokens per second")
    for column in ("target", "text"):
        table.add_column(column, no_wrap=True)
    for column in ("plain", "drafts", "ratio", "tokens a round", "tokens reused"):
        table.add_column(column, justify="right")
    table.add_column("same text")
    for row in comparisons:
        stats = [turn.drafted.stats for turn in row.turns]
        plain, drafted = row.speeds
        rounds = max(1, sum(each.rounds for each in stats))
        paused = any(each.paused for each in stats)
        ratio = drafted / max(plain, 1e-9)
        table.add_row(
            row.target,
            row.story,
            number(plain),
            number(drafted),
            number(ratio) + (", drafting paused" if paused else ""),
            number(sum(each.emitted for each in stats) / rounds),
            str(sum(each.reused for each in stats)),
            _sameness(row),
        )
    return table


def _sameness(row: _Comparison) -> str:
    """Return "yes", or where the first text parts."""
    partings = [turn.parting for turn in row.turns if turn.parting is not None]
    if not partings:
        return "yes"
    worst = min(partings, key=lambda parting: parting.near_tie)
    if worst.near_tie:
        return f"near-tie at {worst.index}"
    return f"[red]not at {worst.index}[/red]"
