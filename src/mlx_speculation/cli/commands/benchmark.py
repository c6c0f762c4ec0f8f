"""`benchmark`: what a draft gains over plain decoding, for a pair of one's own."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from mlx_speculation.cli.chat_template import encode
from mlx_speculation.cli.console import Screen, number, percent
from mlx_speculation.cli.inputs import check_output, sound_text, writing
from mlx_speculation.cli.load_pair import as_object, begin, open_pair
from mlx_speculation.cli.measure import MLX_LM, Arm, Spread, arms_of, measure
from mlx_speculation.cli.options import Json, PairOptions, SamplingOptions
from mlx_speculation.cli.run_app import FAILED, INTERRUPTED
from mlx_speculation.demo import one_prompt_per_group
from mlx_speculation.environment import machine, versions
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation.cli.plots import Panel
    from mlx_speculation.engine import Statistics


def benchmark(
    pair: PairOptions,
    sampling: SamplingOptions,
    prompt: list[str] | None = option(
        None, "Prompt. Repeatable. Default: three bundled ones.", "--prompt", "-p"
    ),
    tokens: int = option(128, "Tokens per run.", "--max-tokens", "-m", min=2),
    passes: int = option(5, "Number of passes; each takes the next prompt.", min=1),
    compare_length: list[int] | None = option(
        None, "Also measure this draft length. Repeatable.", min=1, max=64
    ),
    plot: Path | None = option(None, "Save a plot of the results to this file."),
    json: Json = False,
) -> None:
    """Measure what a draft gains over plain decoding, for a pair of your own.

    Plain is the faster of mlx-lm's loop and ours. All arms run by turns, and every text
    is compared with plain decoding's: the status is 1 where one really differs.
    """
    screen = Screen(json=json)
    _check(pair, prompt, plot)
    blas = begin(pair.blas, screen)
    sampling.check()
    generator = open_pair(pair, screen)
    if pair.draft_length is None:
        with screen.progress("calibrating") as report:
            generator.calibrate(progress=report)
    chance = sampling.sampling(generator.tokenizer).with_seed()
    given = [sound_text("--prompt", text) for text in prompt or ()]
    texts = given or [each.text for each in reversed(one_prompt_per_group())]
    prompts = [encode(generator.tokenizer, text, rendered=False) for text in texts]
    arms = arms_of([pair.draft_length, *sorted(set(compare_length or ()))])
    with screen.progress("measuring") as report:
        done = measure(
            generator,
            arms,
            prompts,
            tokens=tokens,
            sampling=chance,
            passes=passes,
            report=report,
        )
    if not done:
        raise KeyboardInterrupt
    plain = _plain(arms)
    screen.table(_table(arms, plain, f"{done} passes of {tokens} tokens"))
    same = all(arm.same for arm in arms)
    screen.text(_result(arms, same) + "\n")
    screen.object(
        command="benchmark",
        model=pair.model,
        draft=pair.draft,
        passes=done,
        tokens=tokens,
        sampling={
            "temperature": chance.temperature,
            "seed": chance.seed,
        },
        plain=plain.name,
        arms=[_object(arm, plain) for arm in arms],
        same=same,
        notices=generator.notices,
        machine=machine(),
        blas=blas,
        versions=versions(),
    )
    if plot is not None:  # last: a full disk must not cost the figures
        from mlx_speculation.cli.plots import save_plot

        with writing("--plot", plot):
            save_plot([_panel(pair, arms, plain)], plot)
        screen.say(f"the plot is {plot}")
    if done < passes:
        raise typer.Exit(INTERRUPTED)
    if not same:
        raise typer.Exit(FAILED)


def _check(pair: PairOptions, prompts: Sequence[str] | None, plot: Path | None) -> None:
    """Refuse what could not be measured or drawn, before anything is loaded."""
    if pair.draft is None:
        raise InvalidRequestError(
            "There is no draft to measure. Give --draft a folder, 'mtp', 'lookup' or "
            "'auto'."
        )
    if pair.draft_length == 0:
        raise InvalidRequestError(
            "--draft-length is 0, which is plain decoding. Leave it out, or give 1 or "
            "more."
        )
    for text in prompts or ():
        sound_text("--prompt", text)
        if not text:
            raise InvalidRequestError("A --prompt is empty. Give it a text.")
    if plot is not None:
        from mlx_speculation.cli.plots import check_plot

        check_output("--plot", plot)
        check_plot(plot)


def _plain(arms: Sequence[Arm]) -> Arm:
    """Return the faster plain arm."""
    return max(arms[:2], key=lambda arm: Spread.of(arm.speeds).median)


def _table(arms: Sequence[Arm], plain: Arm, title: str) -> Table:
    table = Table(title=f"Tokens per second, {title}")
    table.add_column("arm", no_wrap=True)
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
    return {
        "name": arm.name,
        "draft_length": arm.length,
        "tokens_per_second": arm.speeds,
        "speed": Spread.of(arm.speeds),
        "over_plain": arm.over(plain.speeds),
        "partings": [asdict(parting) for parting in arm.partings],
        "statistics": None if arm.totals is None else _counts(arm.totals),
    }


def _counts(totals: "Statistics") -> dict[str, Any]:
    """Return counts of all passes; times are not among them."""
    return {
        name: value
        for name, value in as_object(totals).items()
        if not name.endswith(("seconds", "second"))
    }


def _panel(pair: PairOptions, arms: Sequence[Arm], plain: Arm) -> "Panel":
    """Return the figures as a plot takes them."""
    from mlx_speculation.cli.plots import Curve, Panel

    drafted = arms[2:]
    spreads = [(arm, Spread.of(arm.speeds)) for arm in drafted]
    totals = [
        (len(arm.totals.reached), arm.length is not None, arm.totals)
        for arm in drafted
        if arm.totals is not None
    ]
    # Of the longest drafts; adaptive ones end at many lengths.
    most = max(totals, key=lambda each: each[:2])[2]
    adaptive = [each.median for arm, each in spreads if arm.length is None]
    curve = Curve(
        name=Path(str(pair.draft)).name,
        measured={arm.length: each for arm, each in spreads if arm.length is not None},
        predicted={},
        adaptive=adaptive[0] if adaptive else None,
        accepted=most.accepted_per_position if most.drafts else (),
    )
    others = {arm.name: Spread.of(arm.speeds).median for arm in arms[:2]}
    del others[plain.name]
    shown = {MLX_LM: "mlx-lm, plain", "plain": "ours, plain"}
    return Panel(
        title=Path(pair.model).name,
        plain=Spread.of(plain.speeds).median,
        curves=[curve],
        others={shown[name]: speed for name, speed in others.items()},
    )
