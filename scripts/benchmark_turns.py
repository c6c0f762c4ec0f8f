"""Ways to decode, finely enough to tell a hundredth: by turns of some tokens.

Whole runs, one after the other, differ by more than the ways to decode do: a shared
machine drifts. So all arms decode the same prompt at the same time, by turns: each
takes a slice of tokens while the others stand still, in another order in each slice.
The first slice brings the prefill and is not counted. Of each prompt an arm's time is
that of its slices together, and so is plain decoding's, which is mlx-lm's
`generate_step` or our `draft=None`, whichever is the faster over all prompts.

At temperature 0 all texts have to be equal, or part at a near-tie; above it, all of
ours: mlx-lm draws from the global generator. The texts of mlx-lm's speculation may be
wrong, which is said.

Lengths by measurement are compared with the best of the named ones, see
`turn_ratios`: a ratio, and between what 95 of 100 draws of its slices lie.

The last line on standard output is one JSON object.

    python scripts/benchmark_turns.py --temperature 1 --group prose --draft lookup
    python scripts/benchmark_turns.py --target dense --draft model --draft-length 8 \
        --mlx-lm-length 8
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from statistics import median
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

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from benchmark_arms import Arm, Models
    from benchmark_case import Case, Series
    from turn_ratios import OverBest

    from mlx_speculation import SpeculativeGenerator

LEAST_TOKENS = 48  # the first slice is not timed, nor is the round that ends it
# What a lookup has to match before it goes before the draft model in the cascade.
LONG_MATCH = 6

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def turns(
    target: Target = None,
    group: Group = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="lookup, model, compiled, mtp, cascade (a lookup, then the compiled "
            "model) or wrong: a model that is."
        ),
    ] = None,
    draft_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Beside lengths by measurement.")
    ] = None,
    mlx_lm_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Of mlx-lm's own speculation.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=LEAST_TOKENS, help="Of each arm.")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="Of each group.")] = 8,
    calibrate: Annotated[
        bool, typer.Option(help="Measure what rounds cost before, not in the streams.")
    ] = False,
    seed: Seed = 0,
    blas: Blas = "auto",
) -> None:
    """Compare ways to decode by turns."""
    use_blas(blas)
    from benchmark_arms import Models, jobs_of
    from benchmark_case import Case, Series, run_case

    results: list[dict[str, Any]] = []
    for name in target or TARGETS:
        models = Models.load(folder_of(name), folder_of("draft"))
        drafts = {each: drafting(each, models, name) for each in draft or []}
        for generator in drafts.values() if calibrate else ():
            generator.calibrate()
        arms = make_arms(models, drafts, draft_length or [], mlx_lm_length or [])
        for each in group or GROUPS:
            texts = texts_of(each, prompts)
            jobs = jobs_of(models, texts, tokens, temperature, seed)
            series, sources = [Series(arm) for arm in arms], [t.source for t in texts]
            case = Case(name, each, temperature, sources, series)
            run_case(case, models, jobs, len(jobs), progress, turns=True)
            results.append({"target": name, "group": each, **ratios(case)})
            show(results[-1])
    print(json.dumps({"temperature": temperature, "blas": blas, "results": results}))


def drafting(draft: str, models: "Models", target: str) -> "SpeculativeGenerator":
    """Make a generator that drafts in the way of that name."""
    from adaptive_cases import always_wrong

    from mlx_speculation import SpeculativeGenerator, load
    from mlx_speculation.engine import MtpDraft

    made: Any = draft
    if draft == "model":
        return models.speculative
    if draft == "compiled":  # a model of its own, as every model is hooked by itself
        return SpeculativeGenerator(
            models.target,
            models.plain.tokenizer,
            draft=load(folder_of("draft"))[0],
            compile_draft=True,
        )
    if draft == "mtp":
        made = MtpDraft.from_folder(folder_of(target), models.target)
    elif draft == "cascade":
        from mlx_speculation import Cascade, LookupDrafter

        made = Cascade(
            LookupDrafter(minimum_match=LONG_MATCH), load(folder_of("draft"))[0]
        )
        return SpeculativeGenerator(
            models.target, models.plain.tokenizer, draft=made, compile_draft=True
        )
    elif draft == "wrong":
        made = always_wrong(load(folder_of("draft"))[0])
    return SpeculativeGenerator(models.target, models.plain.tokenizer, draft=made)


def make_arms(
    models: "Models",
    drafts: dict[str, "SpeculativeGenerator"],
    lengths: list[int],
    mlx_lm: list[int],
) -> "list[Arm]":
    """Make the arms; the first two are those of plain decoding."""
    from benchmark_arms import Arm, mlx_lm_arms, ours, plain_arms

    from mlx_speculation.engine.draft_length.policy_factory import LONGEST

    arms = plain_arms(models)
    for draft, generator in drafts.items():
        auto = partial(ours, generator, None)
        arms.append(Arm("ours", LONGEST, auto, draft, auto=True))
        for length in lengths:
            arms.append(Arm("ours", length, partial(ours, generator, length), draft))
    return arms + mlx_lm_arms(models, mlx_lm)


def ratios(case: "Case") -> dict[str, Any]:
    """Return each arm's speed, and its ratio to the faster plain decoding.

    A ratio over all tokens is one of times, in which each prompt has the same tokens.
    """
    plain = min(case.series[:2], key=lambda series: sum(_seconds(series)))
    arms: list[dict[str, Any]] = []
    for series in case.series:
        seconds = _seconds(series)
        if not seconds:
            arms.append({"arm": series.arm.name, "failure": series.failure})
            continue
        pairs = list(zip(_seconds(plain), seconds, strict=True))
        arms.append(
            {
                "arm": series.arm.name,
                "tokens_per_second": len(seconds) / sum(seconds),
                "x_plain": sum(a for a, _ in pairs) / sum(seconds),
                "each": [a / b for a, b in pairs],
                "acceptance_rate": series.statistics.acceptance_rate,
                "mean_accepted_length": series.statistics.mean_accepted_length,
                "wrong_from": series.wrong_from,
            }
        )
    found: dict[str, Any] = {"plain": plain.arm.name, "arms": arms}
    compared = {arm: asdict(ratio) for arm, ratio in best_ratios(case)}
    return found | ({"over_best": compared} if compared else {})


def best_ratios(case: "Case") -> "Iterator[tuple[str, OverBest]]":
    """Yield arms of lengths by measurement, over the best named one or plain steps."""
    from turn_ratios import over_best

    plain = {s.arm.name: _slices(s) for s in case.series[:1]}
    for series in case.of("ours", auto=True):
        named = case.of("ours", draft=series.arm.draft, auto=False)
        if named:
            others = plain | {each.arm.name: _slices(each) for each in named}
            yield series.arm.name, over_best(_slices(series), others)


def _slices(series: "Series") -> list[tuple[int, float]]:
    return [piece for run in series.runs for piece in run.slices]


def _seconds(series: "Series") -> list[float]:
    """Return the seconds that a token took, prompt by prompt."""
    return [1 / speed for speed in series.speeds]


def show(result: dict[str, Any]) -> None:
    """Print the arms of a target and a group."""
    print(f"\n{result['target']}, {result['group']}: plain is {result['plain']}")
    print(
        f"{'':19} tokens/s  x plain, all tokens  median (smallest to largest)  length"
    )
    for arm in result["arms"]:
        if "failure" in arm:
            print(f"{arm['arm']:19} {arm['failure']}")
            continue
        low, middle, high = min(arm["each"]), median(arm["each"]), max(arm["each"])
        wrong = "" if arm["wrong_from"] is None else "  wrong text"
        print(
            f"{arm['arm']:19} {arm['tokens_per_second']:8.0f}  {arm['x_plain']:19.3f}  "
            f"{middle:.3f} ({low:.2f} to {high:.2f})"
            f"  {arm['mean_accepted_length'] or 0:17.2f}{wrong}"
        )
    for name, found in result.get("over_best", {}).items():
        print(
            f"{name} over {found['best']}: {found['ratio']:.3f} "
            f"({found['low']:.2f} to {found['high']:.2f})"
        )


if __name__ == "__main__":
    run(app)
