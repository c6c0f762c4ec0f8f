"""`benchmark`: measures the speed-up of drafts over plain decoding."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from mlx_speculation.cli.chat_template import TemplateOptions, encode
from mlx_speculation.cli.console import Screen, number, percent
from mlx_speculation.cli.inputs import (
    check_output,
    read_prompts,
    sound_text,
    writing,
)
from mlx_speculation.cli.load_pair import as_object, begin, beside, open_pair
from mlx_speculation.cli.measure import (
    Arm,
    Spread,
    arms_of,
    busy,
    counted_texts,
    measure,
    ratio_note,
)
from mlx_speculation.cli.options import (
    DRAFT,
    TEMPLATE,
    DraftsOptions,
    Json,
    PairOptions,
    SamplingOptions,
)
from mlx_speculation.cli.run_app import FAILED, INTERRUPTED
from mlx_speculation.demo import chat_prompts, one_prompt_per_group
from mlx_speculation.environment import machine
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator


LENGTHS = (1, 2, 4, 8)
LEAST_GAIN = 1.02  # a draft with a smaller speed-up is not recommended
# A fixed length that is faster by less is not recommended in place of the adaptive one,
# which suits other texts, too.
LEAST_LEAD = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of a measurement: lengths to compare, prompts, tokens, passes, plot."""

    compare_length: list[int] | None = option(
        None,
        "Draft length to measure beside the adaptive one, or beside --draft-length. "
        "Repeatable. Default: 1, 2, 4 and 8; none with --draft-length.",
        panel=DRAFT,
        min=1,
        max=64,
    )
    prompt: list[str] | None = option(
        None,
        "Prompt. Repeatable. Default: bundled ones, messages for a chat model.",
        "--prompt",
        "-p",
        panel=TEMPLATE,
    )
    prompts_file: Path | None = option(
        None,
        "JSON lines with prompts: a text under 'prompt', or 'turns' as in Spec-Bench, "
        "of which the first is taken.",
        panel=TEMPLATE,
    )
    tokens: int = option(128, "Tokens per run.", "--max-tokens", "-m", min=2)
    passes: int | None = option(
        None,
        "Number of passes; each takes the next prompt. Default: each prompt once, 5 at "
        "least.",
        min=1,
    )
    plot: Path | None = option(None, "Save a plot of the results to this file.")

    def texts(self) -> list[str]:
        """Return the prompts of --prompt and --prompts-file; refuse empty ones."""
        texts = [sound_text("--prompt", text) for text in self.prompt or ()]
        if not all(texts):
            raise InvalidRequestError("A --prompt is empty. Give it a text.")
        if self.prompts_file is not None:
            texts += read_prompts("--prompts-file", self.prompts_file)
        return texts


def benchmark(
    drafts: DraftsOptions,
    template: TemplateOptions,
    sampling: SamplingOptions,
    run: MeasureOptions,
    json: Json = False,
) -> None:
    """Measure what drafts gain over plain decoding, for models of your own.

    "Plain" is the faster one of mlx-lm's loop and ours; all run by turns. The status is
    1 if a text differs from plain decoding's beyond a near-tie.
    """
    screen = Screen(json=json)
    pairs = drafts.pairs()
    _check(pairs, run.plot)
    template.check()
    given = run.texts()
    here = begin(drafts.blas, screen)
    sampling.check()
    lengths = _lengths(drafts.draft_length, run.compare_length or ())
    drafted = _generators(pairs, lengths, screen)
    names, generators = list(drafted), list(drafted.values())
    labels = [_label(name, each) for name, each in drafted.items()]
    tokenizer = generators[0].tokenizer
    chance = sampling.sampling(tokenizer).with_seed()
    chat = template.applies(tokenizer)
    prompts = _prompts(tokenizer, template, given, chat=chat)
    passes = run.passes or max(5, len(prompts))
    arms = arms_of(labels, lengths)
    size: dict[str, Any] = {"tokens": run.tokens, "sampling": chance, "passes": passes}
    with screen.progress("measuring") as report:
        done = measure(generators, arms, prompts, **size, report=report)
    if not done:
        raise KeyboardInterrupt
    texts = min(done, len(prompts))
    _report(
        screen,
        arms,
        names,
        f"passes: {done}, over {counted_texts(texts, chat=chat)}, up to {run.tokens} "
        "tokens",
        model=drafts.model,
        passes=done,
        texts=texts,
        tokens=run.tokens,
        chat=chat,
        sampling={"temperature": chance.temperature, "seed": chance.seed},
        notices=[notice for each in generators for notice in each.notices],
        **here,
    )
    if run.plot is not None:  # this can fail, so results are printed first
        from mlx_speculation.cli.plots import draw

        with writing("--plot", run.plot) as file:
            draw(Path(drafts.model).name, labels, arms).savefig(file, dpi=130)
        screen.say(f"the plot is {run.plot}")
    if done < passes:
        raise typer.Exit(INTERRUPTED)
    if not all(arm.same for arm in arms):
        raise typer.Exit(FAILED)


def _generators(
    pairs: Sequence[PairOptions], lengths: Sequence[int | None], screen: Screen
) -> "dict[str, SpeculativeGenerator]":
    """Return a generator for each draft; calibrate them if a length is adaptive.

    Two drafts can be the same lookup: "auto" is a lookup if the target's folder offers
    no other draft. Only the first of two lookups with the same length is measured.
    """
    first = open_pair(pairs[0], screen)
    generators = {str(pairs[0].draft): first}
    lookups: dict[int | None, str] = {}
    for pair in pairs:
        name = str(pair.draft)
        generator = generators.get(name) or beside(first, pair)
        assert generator.draft is not None
        if generator.draft.kind == "lookup":
            same = lookups.setdefault(generator.draft_length, name)
            if same != name:
                screen.say(f"{name} is not measured: it is the same draft as {same}")
                continue
        generators[name] = generator
    for generator in generators.values() if None in lengths else ():
        with screen.progress("calibrating") as report:
            generator.calibrate(progress=report)
    return generators


def _label(name: str, generator: "SpeculativeGenerator") -> str:
    """Return the last part of a draft's name; for "auto" also the drafts it has found.

    A name such as "..", which has no last part, stays as it is.
    """
    if name != "auto" or generator.draft is None:
        return Path(name).name or name
    return "auto: " + " and ".join(each.kind for each in generator.draft.members())


def _report(
    screen: Screen, arms: Sequence[Arm], names: Sequence[str], title: str, **more: Any
) -> None:
    """Print the table and the advice, or the JSON object with the fields `more`."""
    ours, theirs = arms[:2]
    plain = ours if ours.over(theirs.speeds).median >= 1 else theirs
    same = all(arm.same for arm in arms)
    advice = _advice(arms, plain, names)
    screen.table(_table(arms, plain, title))
    screen.text(f"{_result(arms, same)}\n{advice}\n")
    screen.object(
        command="benchmark",
        drafts=names,
        plain=plain.name,
        arms=[_object(arm, plain) for arm in arms],
        advice=advice,
        same=same,
        machine=machine(),
        **more,
    )


def _check(pairs: Sequence[PairOptions], plot: Path | None) -> None:
    """Refuse unusable options; called before models are loaded."""
    if not pairs:
        raise InvalidRequestError(
            "There is no draft to measure. Give --draft a folder, 'mtp', 'lookup' or "
            "'auto'."
        )
    if pairs[0].draft_length == 0:
        raise InvalidRequestError(
            "--draft-length is 0, which is plain decoding. Leave it out, or give 1 or "
            "more."
        )
    if plot is not None:
        from mlx_speculation.cli.plots import check_plot

        check_output("--plot", plot)
        check_plot(plot)


def _lengths(given: int | None, others: Sequence[int]) -> list[int | None]:
    """Return the draft lengths to measure; None: adaptive lengths."""
    if given is None and not others:
        others = LENGTHS
    return [given, *sorted(set(others) - {given})]


def _prompts(
    tokenizer: Any, template: TemplateOptions, given: Sequence[str], *, chat: bool
) -> list[list[int]]:
    """Return the ids of given or bundled prompts, rendered as messages if `chat`."""
    bundled = chat_prompts() if chat else reversed(one_prompt_per_group())
    texts = given or [each.text for each in bundled]
    if chat:
        said = [[{"role": "user", "content": text}] for text in texts]
        texts = [template.render(tokenizer, messages) for messages in said]
    return [encode(tokenizer, text, rendered=chat) for text in texts]


def _advice(arms: Sequence[Arm], plain: Arm, names: Sequence[str]) -> str:
    """Return lines that recommend the fastest draft and length, if one pays."""
    for arm in arms[:2]:
        if warning := busy(arm.speeds):
            return warning

    def gain(arm: Arm) -> float:
        return _gain(arm.over(plain.speeds))

    best = max(arms[2:], key=gain)
    least = max(LEAST_GAIN, gain(best) / LEAST_LEAD)
    for arm in arms[2:]:
        if arm.length is None and arm.draft == best.draft and gain(arm) >= least:
            best = arm
    ratio = best.over(plain.speeds)
    shown = (
        f"x plain is {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), its "
        f"harmonic mean {ratio.harmonic_mean:.2f}"
    )
    if gain(best) < LEAST_GAIN:
        return f"No draft pays here: for the best ({best.name}) {shown}."
    length = "" if best.length is None else f" --draft-length {best.length}"
    return f"Best here: --draft {shlex.quote(names[best.draft])}{length}\n{shown}."


def _gain(ratio: Spread) -> float:
    """Return the speed-up of the median pass, or of all together if that is less."""
    return min(ratio.median, ratio.harmonic_mean)


def _table(arms: Sequence[Arm], plain: Arm, title: str) -> Table:
    caption = ratio_note(plain.name)
    table = Table(title=f"Tokens per second, {title}", caption=caption)
    table.add_column("draft", no_wrap=True)
    for column in ("median", "x plain", "min..max", "accepted"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("by position, %")
    for arm in arms:
        speeds, ratio = Spread.of(arm.speeds), arm.over(plain.speeds)
        cells = [
            arm.name,
            f"{speeds.median:.1f}",
            number(ratio.median),
            f"{ratio.low:.2f}..{ratio.high:.2f}",
        ]
        if arm.totals is not None and arm.totals.drafts:
            cells += [
                percent(arm.totals.acceptance_rate),
                " ".join(f"{100 * a:.0f}" for a in arm.totals.accepted_per_position),
            ]
        table.add_row(*cells)
    return table


def _result(arms: Sequence[Arm], same: bool) -> str:
    if not same:
        wrong = next(p for arm in arms for p in arm.partings if not p.near_tie)
        return f"A TEXT DIFFERS from plain decoding's: {wrong}"
    ties = sum(len(arm.partings) for arm in arms)
    near = f", with {ties} near-ties" if ties else ""
    return f"All texts are those of plain decoding{near}."


def _object(arm: Arm, plain: Arm) -> dict[str, Any]:
    """Return the figures of an arm; `statistics` leaves out times and speeds."""
    counts = None
    if arm.totals is not None:
        every = as_object(arm.totals).items()
        counts = {k: v for k, v in every if not k.endswith(("seconds", "second"))}
    return {
        "name": arm.name,
        "draft_length": arm.length,
        "tokens_per_second": arm.speeds,
        "speed": Spread.of(arm.speeds),
        "over_plain": arm.over(plain.speeds),
        "partings": arm.partings,
        "statistics": counts,
    }
