"""Ways to decode, finely enough to tell a hundredth: by turns of some tokens.

Whole runs, one after the other, differ by more than the ways to decode do: a shared
machine drifts. So all arms decode the same prompt at the same time, by turns: each
takes a slice of tokens while the others stand still, in another order in each slice.
The first slice brings the prefill and is not counted. Of each prompt an arm's time is
that of its slices together, and so is plain decoding's, which is mlx-lm's
`generate_step` or our `draft=None`, whichever is the faster over all prompts.

At temperature 0 all texts have to be equal, or part at a near-tie; above it, all of
ours: mlx-lm draws from the global generator.

The last line on standard output is one JSON object.

    python scripts/benchmark_turns.py --temperature 1 --group prose --draft lookup
    python scripts/benchmark_turns.py --target dense --draft model --draft-length 8 \
        --mlx-lm-length 8
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
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
    from benchmark_arms import Job, Models

    from mlx_speculation import SpeculativeGenerator

SLICE = 16  # tokens
PLAIN = ("mlx-lm plain", "ours plain")

Begin = Callable[["Job", ExitStack], Iterator[int]]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def turns(
    target: Target = None,
    group: Group = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="lookup, model, compiled, mtp or wrong: a model that is."),
    ] = None,
    draft_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Beside lengths by measurement.")
    ] = None,
    mlx_lm_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Of mlx-lm's own speculation.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2 * SLICE, help="Of each arm.")] = 128,
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

    results = []
    for name in target or TARGETS:
        models = Models.load(folder_of(name), folder_of("draft"))
        drafts = {each: drafting(each, models, name) for each in draft or []}
        for generator in drafts.values() if calibrate else ():
            generator.calibrate()
        arms = make_arms(models, drafts, draft_length or [], mlx_lm_length or [])
        for each in group or GROUPS:
            jobs = jobs_of(models, texts_of(each, prompts), tokens, temperature, seed)
            progress(f"{name}, {each}: warm-up")
            seconds: dict[str, list[float]] = {arm: [] for arm in arms}
            timed(models, arms, jobs[0], 0)
            for number, job in enumerate(jobs):
                progress(f"{name}, {each}: prompt {number + 1} of {len(jobs)}")
                for arm, spent in timed(models, arms, job, number).items():
                    seconds[arm].append(spent)
            results.append({"target": name, "group": each, **ratios(seconds, tokens)})
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
    elif draft == "wrong":
        made = always_wrong(load(folder_of("draft"))[0])
    return SpeculativeGenerator(models.target, models.plain.tokenizer, draft=made)


def make_arms(
    models: "Models",
    drafts: dict[str, "SpeculativeGenerator"],
    lengths: list[int],
    mlx_lm: list[int],
) -> dict[str, Begin]:
    """Make the arms; the first two are those of plain decoding."""
    arms: dict[str, Begin] = {
        PLAIN[0]: partial(begin_mlx_lm, models, 0),
        PLAIN[1]: partial(begin_ours, models.plain, 0),
    }
    for draft, generator in drafts.items():
        arms[f"{draft} auto"] = partial(begin_ours, generator, None)
        for length in lengths:
            arms[f"{draft} k={length}"] = partial(begin_ours, generator, length)
    for length in mlx_lm:
        arms[f"mlx-lm k={length}"] = partial(begin_mlx_lm, models, length)
    return arms


def begin_ours(
    generator: "SpeculativeGenerator", length: int | None, job: "Job", stack: ExitStack
) -> Iterator[int]:
    """Begin a stream of ours; None: lengths by measurement."""
    stream = stack.enter_context(
        generator.stream(
            job.prompt,
            max_tokens=job.tokens + 1,
            sampling=job.sampling,
            stop_tokens=(),
            draft_length=length,
        )
    )
    return (chunk.token for chunk in stream)


def begin_mlx_lm(
    models: "Models", length: int, job: "Job", stack: ExitStack
) -> Iterator[int]:
    """Begin mlx-lm's decoding, with its speculation from a length of 1 on."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step, speculative_generate_step
    from mlx_lm.sample_utils import make_sampler

    from mlx_speculation.models import wired

    stack.enter_context(wired(models.target))
    prompt, sampler = mx.array(job.prompt), make_sampler(temp=job.temperature)
    mx.random.seed(job.seed)
    steps: Any = (
        speculative_generate_step(
            prompt,
            models.target,
            models.draft,
            num_draft_tokens=length,
            max_tokens=job.tokens + 1,
            sampler=sampler,
        )
        if length
        else generate_step(
            prompt, models.target, max_tokens=job.tokens + 1, sampler=sampler
        )
    )
    stack.callback(steps.close)
    return (int(step[0]) for step in steps)


def timed(
    models: "Models", arms: dict[str, Begin], job: "Job", first: int
) -> dict[str, float]:
    """Return the seconds of each arm for one prompt, without those of its first slice.

    Raises:
        AssertionError: texts differ that have to be equal.
    """
    texts: dict[str, list[int]] = {name: [] for name in arms}
    seconds = dict.fromkeys(arms, 0.0)
    with ExitStack() as stack:
        begun = {name: begin(job, stack) for name, begin in arms.items()}
        for number in range(job.tokens // SLICE):
            order = list(arms)
            turn = (number + first) % len(order)
            order = order[turn:] + order[:turn]
            for name in order if number % 2 else order[::-1]:
                spent = take(begun[name], texts[name])
                seconds[name] += spent if number else 0.0
    check(models, job, texts)
    return seconds


def take(arm: Iterator[int], text: list[int]) -> float:
    """Take a slice of tokens, with nothing in flight before and after; in seconds."""
    import mlx.core as mx
    from mlx_lm.generate import generation_stream

    started = time.perf_counter()
    text += islice(arm, SLICE)
    mx.synchronize()
    mx.synchronize(generation_stream)
    return time.perf_counter() - started


def check(models: "Models", job: "Job", texts: dict[str, list[int]]) -> None:
    """Compare the texts that have to be equal with that of our plain decoding."""
    from mlx_speculation.engine.identity import find_parting

    ours = texts[PLAIN[1]]
    for name, text in texts.items():
        if text == ours or (job.temperature > 0 and name.startswith("mlx-lm")):
            continue
        chooser = models.chooser(job)
        parting = find_parting(models.target, chooser, job.prompt, ours, text, width=1)
        if parting is not None and not parting.near_tie:
            raise AssertionError(f"the text of {name} is another one: {parting}")


def ratios(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Return each arm's speed, and its ratio to the faster plain decoding."""
    plain = min(PLAIN, key=lambda name: sum(seconds[name]))
    counted = tokens // SLICE * SLICE - SLICE
    arms = []
    for name, spent in seconds.items():
        each = [a / b for a, b in zip(seconds[plain], spent, strict=True)]
        arms.append(
            {
                "arm": name,
                "tokens_per_second": counted * len(spent) / sum(spent),
                "x_plain": sum(seconds[plain]) / sum(spent),
                "each": each,
            }
        )
    return {"plain": plain, "arms": arms}


def show(result: dict[str, Any]) -> None:
    """Print the arms of a target and a group."""
    print(f"\n{result['target']}, {result['group']}: plain is {result['plain']}")
    print(f"{'':14} tokens/s  x plain, all tokens  median (smallest to largest)")
    for arm in result["arms"]:
        low, middle, high = min(arm["each"]), median(arm["each"]), max(arm["each"])
        print(
            f"{arm['arm']:14} {arm['tokens_per_second']:8.0f}  {arm['x_plain']:19.3f}  "
            f"{middle:.3f} ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    run(app)
