"""The time to the first token, beside that of plain decoding, by turns.

A few prompts say little: on a shared machine one and the same prompt takes a fifth more
or less from run to run. So all arms read each prompt in turn, in another order in each
pass, and the ratio to plain decoding is taken prompt by prompt and pass by pass. Plain
is mlx-lm's `generate_step` or our `draft=None`, whichever is the sooner over all.

What comes behind the first token is generated too, so that a draft that is read late is
read here as it is elsewhere. The last line on standard output is one JSON object.

    python scripts/benchmark_first_token.py --target dense --group code
    python scripts/benchmark_first_token.py --draft model --draft lookup --passes 12
"""

import json
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer
from benchmark_options import (
    GROUPS,
    TARGETS,
    Blas,
    Group,
    Seed,
    Target,
    folder_of,
    progress,
    texts_of,
)
from benchmark_turns import drafting, make_arms

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from benchmark_arms import Arm, Job

DRAFTS = ["model", "compiled", "lookup"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def first_token(
    target: Target = None,
    group: Group = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="As for benchmark_turns.py; by default the first three."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    prompts: Annotated[int, typer.Option(min=1, help="Of each group.")] = 8,
    passes: Annotated[int, typer.Option(min=2, help="Over all prompts.")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="Of each text.")] = 24,
    seed: Seed = 0,
    blas: Blas = "auto",
) -> None:
    """Compare times to the first token; lengths by measurement, calibrated before."""
    progress(f"BLAS: {use_blas(blas).detail}")
    from benchmark_arms import Models, jobs_of

    results = []
    for name in target or TARGETS:
        models = Models.load(folder_of(name), folder_of("draft"))
        drafts = {each: drafting(each, models, name) for each in draft or DRAFTS}
        for generator in drafts.values():
            generator.calibrate()
        arms = make_arms(models, drafts, [], [])
        for each in group or GROUPS:
            texts = texts_of(each, prompts)
            jobs = jobs_of(models, texts, tokens, temperature, seed)
            result = {"target": name, "group": each, **_measured(arms, jobs, passes)}
            results.append(result)
            _show(result)
    print(json.dumps({"temperature": temperature, "blas": blas, "results": results}))


def _measured(arms: "list[Arm]", jobs: "list[Job]", passes: int) -> dict[str, Any]:
    """Run all arms by turns; the first two are plain decoding."""
    for arm in arms:
        arm.run(jobs[0])
    seconds: list[list[float]] = [[] for _ in arms]
    order = list(range(len(arms)))
    for number in range(passes):
        for index, job in enumerate(jobs):
            first = (number + index) % len(arms)
            turns = order[first:] + order[:first]
            for place in turns if number % 2 == 0 else turns[::-1]:
                seconds[place].append(arms[place].run(job).first_seconds)
    plain = min(seconds[:2], key=median)
    return {
        "plain": arms[seconds.index(plain)].name,
        "arms": [
            _ratios(arm.name, own, plain)
            for arm, own in zip(arms, seconds, strict=True)
        ],
    }


def _ratios(name: str, seconds: list[float], plain: list[float]) -> dict[str, Any]:
    pairs = zip(seconds, plain, strict=True)
    lower, middle, upper = quantiles([own / other for own, other in pairs], n=4)
    return {
        "arm": name,
        "seconds": median(seconds),
        "x_plain": middle,
        "quartiles": [lower, upper],
        "runs": len(seconds),
    }


def _show(result: dict[str, Any]) -> None:
    print(f"\n{result['target']}, {result['group']}: plain is {result['plain']}")
    print(f"{'':19} milliseconds  x plain (quartiles)")
    for arm in result["arms"]:
        lower, upper = arm["quartiles"]
        print(
            f"{arm['arm']:19} {1e3 * arm['seconds']:12.1f}  {arm['x_plain']:.3f} "
            f"({lower:.2f} to {upper:.2f})"
        )


if __name__ == "__main__":
    run(app)
