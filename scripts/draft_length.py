r"""What adaptive draft lengths gain and lose, beside every fixed one, by turns.

Requests of few tokens change their group of prompts each time, and what rounds cost is
not known at first: that is where adaptive lengths can only lose. All arms decode the
same request at the same time, as in speed.py, and texts are compared. Of each draft:

    x plain       adaptive over our plain decoding
    x best        over the best of plain decoding and the fixed lengths, on each group;
                  chosen by one half of the slices and compared in the other, since the
                  best of several is in part the luckiest

The draft "wrong" always proposes what the draft model holds for the least probable:
what trying costs where nothing can be gained.

    python scripts/draft_length.py
    python scripts/draft_length.py --draft wrong --temperature 1 --tokens 300

With --explain every round of the adaptive arm is printed instead: what the policy knew,
what it chose, and what came of it. With --traces texts that were recorded are replayed
at the costs of --machine, without a clock, see `bench.replays`; a plain step takes a
second there.

    python scripts/draft_length.py --explain --draft lookup+model --prompts 1
    python scripts/draft_length.py --traces tests/support/draft_length/traces.npz \
        --draft hybrid-lookup+hybrid-mtp --machine h100 --explain
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bench.options import (
    Blas,
    DraftModel,
    Drafts,
    Groups,
    Json,
    Lengths,
    Prompts,
    Seed,
    Targets,
    Temperature,
    Tokens,
)
from bench.prompts import bundled
from bench.report import reported
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from bench.models import Bench
    from bench.prompts import Question
    from bench.report import Report
    from bench.series import Series
    from mlx_speculation.engine import Feedback, Plan

Machine = Literal["cpu", "h100", "mac", "linear"]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def draft_length(
    context: typer.Context,
    target: Targets = None,
    draft_model: DraftModel = "draft",
    draft: Drafts = None,
    draft_length: Lengths = None,
    group: Groups = None,
    temperature: Temperature = 0.0,
    tokens: Tokens = 100,
    prompts: Prompts = 7,
    seed: Seed = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print each round instead.")
    ] = False,
    traces: Annotated[
        Path | None,
        typer.Option(
            "--traces",
            help="Replay this file; --draft names its pairs.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    machine: Annotated[
        Machine, typer.Option("--machine", help="Whose costs a replay has.")
    ] = "cpu",
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Compare adaptive with fixed lengths, after checking the text."""
    with reported(context) as report:
        if traces is not None:
            replay(traces, draft, machine, tokens, report, explain=explain)
            return
        from bench.arms import drafted_arms, plain_arms
        from bench.models import Bench
        from bench.series import Series, compare_each, jobs_of

        for name in target or ["dense"]:
            bench = Bench.of(name, draft_model)
            drafts = draft or [*bench.default_drafts, "wrong"]
            options: dict[str, Any] = {"temperature": temperature, "seed": seed}
            if explain:
                for each in drafts:
                    for text, questions in bundled(group, prompts).items():
                        row = explained(bench, each, questions, tokens, options)
                        report.add(target=bench.name, draft=each, group=text, **row)
                continue
            arms = drafted_arms(bench, drafts, draft_length or [2, 4, 8])
            found, runs = {}, []
            for text, questions in bundled(group, prompts).items():
                found[text] = [Series(arm) for arm in (*plain_arms(bench), *arms)]
                jobs = jobs_of(bench, questions, tokens=tokens, **options)
                runs.append(compare_each(bench, found[text], jobs, report.say))
            while runs:  # the groups take turns
                runs = [each for each in runs if next(each, None) is not None]
            for each in drafts:
                for row in rows_of(each, found):
                    report.add(target=bench.name, draft=each, **row)


def replay(
    file: Path,
    drafts: Sequence[str] | None,
    machine: str,
    tokens: int,
    report: "Report",
    *,
    explain: bool,
) -> None:
    """Replay pairs of a file, or all of them, as requests of so many tokens."""
    import numpy as np

    from bench.replays.replay import compared, machines_of

    recorded = dict(np.load(file))
    pairs = list(dict.fromkeys(name.partition("/")[0] for name in recorded))
    for draft in drafts or pairs:
        each = draft.split("+")
        if unknown := set(each) - set(pairs):
            raise typer.BadParameter(
                f"{file.name} has {', '.join(pairs)}; there is no {min(unknown)!r}"
            )
        costs = machines_of(recorded, each)[machine]
        for found in compared(recorded, each, costs, tokens, explain=explain):
            if explain:
                say(f"{draft} {found.group}", found.own.decisions or ())
            report.add(
                draft=draft,
                group=found.group,
                x_plain=found.over_plain,
                x_best=found.over_best,
                best=found.best,
            )


def explained(
    bench: "Bench",
    draft: str,
    questions: "Sequence[Question]",
    tokens: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Generate texts with adaptive lengths, print their rounds, and count them."""
    from bench.series import total
    from mlx_speculation import Sampling

    generator, counts = bench.generator(draft), []
    for question in questions:
        stream = generator.stream(
            question.prompt(bench.tokenizer),
            max_tokens=tokens,
            sampling=Sampling(**options),
            stop_tokens=(),
            explain=True,
        )
        for _ in stream:
            pass
        say(f"{draft} {question.group}", stream.decisions)
        counts.append(stream.stats)
    found = total(counts)
    return {
        "rounds": found.rounds,
        "drafts": found.drafts,
        "accepted": found.acceptance_rate,
    }


def say(title: str, decisions: "Iterable[tuple[Plan, Feedback]]") -> None:
    """Print what was decided in each round, and what came of it."""
    typer.echo(title)
    for number, (plan, outcome) in enumerate(decisions):
        came = f"{outcome.accepted:g} of {outcome.drafted}"
        came += f" in {outcome.seconds * 1e3:.1f} ms{' behind a step' * outcome.behind}"
        typer.echo(f"{number:5} {came}; {plan}")


def rows_of(draft: str, found: "dict[str, list[Series]]") -> list[dict[str, Any]]:
    """Return the rows of one draft: of each group, and of all together."""
    rows, seconds, tokens = [], dict.fromkeys(("own", "plain", "best"), 0.0), 0
    for group, series in found.items():
        (own,) = (s for s in series if s.arm.draft == draft and s.arm.length is None)
        fixed = [s for s in series if s.arm.draft == draft and s.arm.length]
        others = [series[0], *fixed]
        over = over_best(own.slices, [each.slices for each in others])
        counts, timed = own.statistics, sum(count for count, _ in own.slices)
        rows.append(
            {
                "group": group,
                "x_plain": own.speed / series[0].speed,
                "x_best": over,
                "best": max(others, key=lambda each: each.speed).arm.name,
                "tokens/s": own.speed,
                "rounds": counts.rounds,
                "drafts": counts.drafts,
                "accepted": counts.acceptance_rate,
                "texts": own.text,
                "fixed": {s.arm.name: s.speed / series[0].speed for s in fixed},
            }
        )
        tokens += timed
        seconds["own"] += timed / own.speed
        seconds["plain"] += timed / series[0].speed
        seconds["best"] += over * timed / own.speed
    whole: dict[str, Any] = {
        "group": "all",
        "x_plain": seconds["plain"] / seconds["own"],
        "x_best": seconds["best"] / seconds["own"],
        "tokens/s": tokens / seconds["own"],
    }
    return [*rows, whole]


def over_best(
    own: Sequence[tuple[int, float]], others: Sequence[Sequence[tuple[int, float]]]
) -> float:
    """Return a speed over that of the best other, chosen by the other half of slices.

    Args:
        own: timed tokens and seconds of each slice.
        others: of each other, at least one.
    """
    from bench.series import speed_of

    ratios = []
    for half in (0, 1):
        best = max(others, key=lambda each: speed_of(each[1 - half :: 2]))
        ratios.append(speed_of(own[half::2]) / speed_of(best[half::2]))
    return sum(ratios) / 2


if __name__ == "__main__":
    run(app)
