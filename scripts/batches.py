"""Batches: speed with drafts over plain decoding of the same prompts.

The first arm is mlx-lm's BatchGenerator, the second is ours without a draft. The arms
take turns on the same prompts. The clock starts when all rows are generating and stops
at the end of the last text. The script fails if a text differs from mlx-lm's (above
temperature 0, from the second arm's) before a near-tie.

    python scripts/batches.py
    python scripts/batches.py --target hybrid --draft mtp --batch 8 --batch 32
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import options as opt
from bench.prompts import bundled
from bench.report import reported
from bench.turns import Spread, in_turns
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from bench.models import Bench
    from mlx_speculation import Sampling, SpeculativeGenerator
    from mlx_speculation.engine import BatchStatistics

# The logits where two texts differ are computed again in forwards of so many tokens,
# once at each place.
PLACES = 2
# The largest difference of two tokens' scores at which a batch's text may differ: in
# float32, and in half precision (bfloat16 has steps of 1/8 from 16 to 32).
OFF_BY, HALF_OFF_BY = 1e-3, 0.3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts of one batch, each with its sampling options."""

    prompts: list[list[int]]
    samplings: "list[Sampling]"
    tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one arm with a job."""

    texts: list[list[int]]
    speed: float  # tokens per second of the whole batch
    stats: "BatchStatistics | None" = None


@app.command()
def batches(
    context: typer.Context,
    target: opt.Target = "dense",
    draft_model: opt.DraftModel = "draft",
    draft: opt.Drafts = None,
    draft_length: opt.Lengths = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows; by default 1, 2, 4 and 8.")
    ] = None,
    group: opt.Groups = None,
    temperature: opt.Temperature = 0.0,
    tokens: opt.Tokens = 96,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="At most.")] = 512,
    repeats: opt.Repeats = 5,
    blas: opt.Blas = "auto",
    json_file: opt.Json = None,
) -> None:
    """Measure batches of several sizes, and check their texts."""
    with reported(context) as report:
        from bench.models import Bench
        from mlx_speculation import Sampling

        bench = Bench.of(target, draft_model)
        arms: dict[str, Callable[[Job], Run]] = {
            "mlx-lm plain": partial(mlx_lm, bench),
            "ours plain": partial(ours, bench.plain, 0),
        }
        for name in draft or ["model", "lookup"]:
            generator = bench.generator(name)
            for length in draft_length or [4]:
                arms[f"{name} k={length}"] = partial(ours, generator, length)
            arms[f"{name} adaptive"] = partial(ours, generator, None)
        for rows in batch or [1, 2, 4, 8]:
            samplings = [Sampling(temperature=temperature, seed=n) for n in range(rows)]
            for text, questions in bundled(group, 1 << 20).items():
                report.say(f"{rows} rows, {text}")
                ids = [each.prompt(bench.tokenizer) for each in questions]
                prompts = prompts_of(ids, rows * repeats, prompt_tokens)
                jobs = [
                    Job(prompts[n * rows : (n + 1) * rows], samplings, tokens)
                    for n in range(repeats)
                ]
                for row in compared(bench, arms, jobs):
                    report.add(target=bench.name, rows=rows, group=text, **row)


def prompts_of(texts: list[list[int]], count: int, longest: int) -> list[list[int]]:
    """Return prompts of at most `longest` tokens; a repeated text lacks its start."""
    prompts = []
    for number in range(count):
        text, cut = texts[number % len(texts)], 7 * (number // len(texts))
        prompts.append(text[cut % max(1, len(text) // 2) :][:longest])
    return prompts


def mlx_lm(bench: "Bench", job: Job) -> Run:
    """Run mlx-lm's own batch generator."""
    from mlx_lm.generate import BatchGenerator

    from mlx_speculation import make_sampler

    temperature, rows = job.samplings[0].temperature, len(job.prompts)
    batch: Any = BatchGenerator(
        bench.bare,
        max_tokens=job.tokens,
        sampler=make_sampler(temperature) if temperature else None,
        prefill_batch_size=rows,
        completion_batch_size=rows,
    )
    texts: dict[int, list[int]] = {
        uid: [] for uid in batch.insert([list(prompt) for prompt in job.prompts])
    }
    started, timed, ended = 0.0, 0, 0
    while ended < rows:
        responses = batch.next()[1]
        for response in responses:
            texts[response.uid].append(response.token)
            ended += response.finish_reason is not None
        if started:
            timed += len(responses)
        elif all(texts.values()):
            started = time.perf_counter()
    seconds = time.perf_counter() - started
    batch.close()
    return Run([*texts.values()], timed / seconds)


def ours(generator: "SpeculativeGenerator", length: int | None, job: Job) -> Run:
    """Run our batch generator; `length`: of drafts, None: adaptive."""
    from mlx_speculation import BatchGenerator

    options: dict[str, Any] = {"max_tokens": job.tokens, "stop_tokens": ()}
    with BatchGenerator(generator, max_rows=len(job.prompts)) as batch:
        uids = [
            batch.insert(prompt, sampling=sampling, draft_length=length, **options)
            for prompt, sampling in zip(job.prompts, job.samplings, strict=True)
        ]
        while batch.waiting:
            batch.next()
        before, started = batch.stats.emitted, time.perf_counter()
        while batch.running:
            batch.next()
        seconds = time.perf_counter() - started
        timed = batch.stats.emitted - before
        texts = [batch.remove(uid).tokens for uid in uids]
    return Run(texts, timed / seconds, batch.stats)


def compared(
    bench: "Bench", arms: dict[str, Callable[[Job], Run]], jobs: list[Job]
) -> list[dict[str, Any]]:
    """Let the arms take turns, compare their texts, and return the table rows."""
    acts = {name: lambda n, act=act: act(jobs[n]) for name, act in arms.items()}
    runs = in_turns(acts, len(jobs))
    first, second = list(runs)[:2]
    greedy = jobs[0].samplings[0].greedy
    rows = []
    for name, series in runs.items():
        compares = greedy or name != first  # mlx-lm draws differently
        reference = runs[first if greedy else second]
        ties = sum(map(partial(near_ties, bench), jobs, series, reference)) * compares
        speeds = [each.speed for each in series]
        row: dict[str, Any] = {
            "arm": name,
            "tokens_per_second": Spread.of(speeds).median,
            "x_mlx_lm": Spread.over(speeds, [each.speed for each in runs[first]]),
            "x_plain": Spread.over(speeds, [each.speed for each in runs[second]]),
        }
        stats = [each.stats for each in series if each.stats is not None]
        if stats:
            drafted = sum(each.drafted for each in stats)
            forwards = sum(each.forwards for each in stats)
            row |= {
                "accepted": sum(each.accepted for each in stats) / max(1, drafted),
                "forwards": forwards,
                "rows_a_forward": sum(each.row_rounds for each in stats) / forwards,
            }
        rows.append({**row, "near_ties": ties})
    return rows


def near_ties(bench: "Bench", job: Job, ours: Run, reference: Run) -> int:
    """Return how many texts differ first at a near-tie; fail if one differs earlier."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights: Any = tree_flatten(bench.model.parameters())
    most = OFF_BY if weights[0][1].dtype == mx.float32 else HALF_OFF_BY
    ties = 0
    rows = zip(job.prompts, job.samplings, reference.texts, ours.texts, strict=True)
    for prompt, sampling, expected, got in rows:
        if expected != got:
            parting = bench.parting(
                prompt, sampling, expected, got, width=PLACES, places=PLACES
            )
            assert parting is not None
            assert len(expected) == len(got), parting
            # Rounding may differ more in a batch than in wide forwards of one row.
            assert parting.near_tie or parting.margin < most, parting
            ties += 1
    return ties


if __name__ == "__main__":
    run(app)
