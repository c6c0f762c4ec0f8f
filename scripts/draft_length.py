r"""Explains each adaptive draft length, or replays a policy on recorded texts.

For every round, the script prints what the policy knew, the chosen draft length, and
the result. With --traces, it replays recorded texts at the costs of --machine, without
a clock: times are computed, and a plain step counts as one second. The draft "wrong"
proposes the least probable token of the draft model, and so shows the cost of trying a
draft that gains nothing.

    python scripts/draft_length.py --draft lookup+model --prompts 1
    python scripts/draft_length.py --traces tests/support/draft_length/traces.npz \
        --draft hybrid-lookup+hybrid-mtp --machine h100 --explain
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bench import options as opt
from bench.prompts import bundled
from bench.report import reported
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from bench.models import Bench
    from bench.prompts import Question
    from bench.report import Report
    from mlx_speculation.engine import Feedback, Plan

Machine = Literal["cpu", "h100", "mac", "linear"]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def draft_length(
    context: typer.Context,
    target: opt.Targets = None,
    draft_model: opt.DraftModel = "draft",
    draft: opt.Drafts = None,
    group: opt.Groups = None,
    temperature: opt.Temperature = 0.0,
    tokens: opt.Tokens = 100,
    prompts: opt.Prompts = 7,
    seed: opt.Seed = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="With --traces, print each round too.")
    ] = False,
    traces: Annotated[
        Path | None,
        typer.Option(
            "--traces",
            help="Replay this file; --draft selects pairs such as dense-lookup.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    machine: Annotated[
        Machine, typer.Option("--machine", help="Machine whose costs a replay uses.")
    ] = "cpu",
    blas: opt.Blas = "auto",
    json_file: opt.Json = None,
) -> None:
    """Print the rounds of adaptive lengths, or replay recorded texts."""
    with reported(context) as report:
        if traces is not None:
            replay(traces, draft, machine, tokens, report, explain=explain)
            return
        from bench.models import Bench

        for name in target or ["dense"]:
            bench = Bench.of(name, draft_model)
            drafts = draft or [*bench.default_drafts, "wrong"]
            options: dict[str, Any] = {"temperature": temperature, "seed": seed}
            for each in drafts:
                for text, questions in bundled(group, prompts).items():
                    row = explained(bench, each, questions, tokens, options)
                    report.add(target=bench.name, draft=each, group=text, **row)


def replay(
    file: Path,
    drafts: Sequence[str] | None,
    machine: str,
    tokens: int,
    report: "Report",
    *,
    explain: bool,
) -> None:
    """Replay pairs of target and draft, by default all, with `tokens` a request."""
    import numpy as np

    from bench.replays.replay import judged, machines_of

    recorded = dict(np.load(file))
    pairs = list(dict.fromkeys(name.partition("/")[0] for name in recorded))
    for draft in drafts or pairs:
        each = draft.split("+")
        if unknown := set(each) - set(pairs):
            raise typer.BadParameter(
                f"{file.name} has {', '.join(pairs)}; there is no {min(unknown)!r}"
            )
        costs = machines_of(recorded, each)[machine]
        for result in judged(recorded, each, costs, tokens, explain=explain):
            if explain:
                say(f"{draft} {result.group}", result.ours.decisions or ())
            report.add(
                draft=draft,
                group=result.group,
                x_plain=result.over_plain,
                x_best=result.over_best,
                best=result.best,
            )


def explained(
    bench: "Bench",
    draft: str,
    questions: "Sequence[Question]",
    tokens: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Generate texts with adaptive lengths, print the rounds, and return counts."""
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
    result = total(counts)
    return {
        "rounds": result.rounds,
        "drafts": result.drafts,
        "accepted": result.acceptance_rate,
    }


def say(title: str, decisions: "Iterable[tuple[Plan, Feedback]]") -> None:
    """Print the result of each round and its plan."""
    typer.echo(title)
    for number, (plan, outcome) in enumerate(decisions):
        came = f"{outcome.accepted:g} of {outcome.drafted}"
        came += f" in {outcome.seconds * 1e3:.1f} ms"
        came += ", begun during a plain step" * outcome.behind
        typer.echo(f"{number:5} {came}; {plan}")


if __name__ == "__main__":
    run(app)
