"""Measures batches: speculative over plain decoding of the same prompts together.

Plain is mlx-lm's BatchGenerator; ours without a draft is an arm as well. For every
batch size and group of prompts the arms take turns on the same prompts and budgets, so
that a slow moment of the machine meets all alike, and a ratio is one of the same pass.
Texts are compared first: at temperature 0 with mlx-lm's, above it with ours without a
draft; they are equal, or part where the choice is a near-tie, which is counted, and
anything else ends the script. Drafts of fixed lengths, and "auto", whose lengths are
chosen by what rounds of so many rows cost here, as `calibrate_batches` has measured it
for the numbers of rows that are met on the way down; with `--no-calibrate` it measures
in its own rounds. It warms up longer, since it meets more shapes and learns what is
accepted.

The clock leaves prompts out. Rows that end early leave the others alone in the batch,
as they would at the end of a queue; that is in the time.

The last line on standard output is one JSON object with everything.

    python scripts/benchmark_batch.py
    python scripts/benchmark_batch.py --shape 8B --batch 1 --batch 8 --batch 32
    python scripts/benchmark_batch.py --target hybrid --draft mtp
"""

import json
import os
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from benchmark_options import GROUPS, Blas, Group, Json, folder_of, progress, texts_of

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from batch_arms import Arm, Job
    from batch_models import Models

BATCHES = [1, 2, 4, 8]
LENGTHS = [2, 4, 8]
PLACES = 2  # of a forward, to try a row that parts in
# Margins that a batch may turn over: in float32, and in half precision; bfloat16 logits
# from 16 on have steps of an eighth.
OFF_BY, HALF_OFF_BY = 1e-3, 0.3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmark(
    target: Annotated[str, typer.Option(help="dense, sliding, hybrid, a folder.")] = (
        "dense"
    ),
    draft_model: Annotated[str, typer.Option(help="A folder.")] = "draft",
    shape: Annotated[str, typer.Option(help="'as it is', 1B or 8B, bfloat16.")] = (
        "as it is"
    ),
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 1, 2, 4 and 8.")
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="model, lookup, by default both; eagle for dense, mtp for hybrid."
        ),
    ] = None,
    draft_length: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 2, 4 and 8.")
    ] = None,
    group: Group = None,
    tokens: Annotated[int, typer.Option(min=8, help="Of each text.")] = 96,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="At most.")] = 512,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    auto_warm_up: Annotated[
        int, typer.Option(min=1, help='Jobs that "auto" runs first, uncounted.')
    ] = 4,
    calibrate: Annotated[
        bool, typer.Option(help='Measure what rounds cost first, for "auto".')
    ] = True,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Measure batches of several sizes, after checking texts."""
    chosen = use_blas(blas)
    progress(f"BLAS: {chosen.detail}")
    with tempfile.TemporaryDirectory() as folder:
        # What earlier runs measured must not decide what this one measures.
        os.environ["MLX_SPECULATION_CACHE"] = folder
        from batch_arms import Job
        from batch_models import load_models

        from mlx_speculation.environment import machine, versions

        names = draft or ["model", "lookup"]
        models = load_models(target, folder_of(draft_model), shape, names)
        results = []
        lengths = draft_length or LENGTHS
        if calibrate:
            _calibrate(models, max(batch or BATCHES), prompt_tokens + tokens)
        for rows in batch or BATCHES:
            for name in group or GROUPS:
                arms = list(_arms(models, lengths, auto_warm_up))
                prompts = _jobs(models.tokenizer, name, rows, prompt_tokens, repeats)
                jobs = [Job(each, tokens, temperature) for each in prompts]
                results.append(
                    _measured(arms, jobs, repeats, (models.target, rows, name))
                )
    report = {
        "machine": machine(),
        "versions": versions(),
        "blas": chosen.detail,
        "target": target if shape == "as it is" else f"{target} grown to {shape}",
        "tokens": tokens,
        "temperature": temperature,
        "results": results,
    }
    written = json.dumps(report)
    if json_file is not None:
        json_file.write_text(written + "\n", encoding="utf-8")
    print(written)


def _arms(models: "Models", lengths: list[int], warm_up: int) -> Any:
    """Yield all arms; the first two are plain, and "auto" has longer to warm up."""
    from bare_models import bare
    from batch_arms import Arm, mlx_lm, ours

    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine.draft_length.policy_factory import LONGEST

    yield Arm("mlx-lm", partial(mlx_lm, bare(models.target)))
    plain = SpeculativeGenerator(models.target, models.tokenizer)
    yield Arm("plain", partial(ours, plain, 0))
    for name, draft in models.drafts.items():
        generator = SpeculativeGenerator(models.target, models.tokenizer, draft=draft)
        for length in lengths:
            yield Arm(f"{name} {length}", partial(ours, generator, length), length + 1)
        run_auto = partial(ours, generator, None)
        yield Arm(f"{name} auto", run_auto, LONGEST + 1, warm_up)


def _calibrate(models: "Models", rows: int, context: int) -> None:
    """Measure rounds of all numbers of rows that are met, in the middle of a text."""
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine.batch.draft_length import row_bucket
    from mlx_speculation.models.round_context import cuda_serves
    from mlx_speculation.models.shape_buckets import row_size

    kept_as = row_size if cuda_serves() else row_bucket
    sizes = sorted({min(rows, kept_as(count)) for count in range(1, rows + 1)})
    for name, draft in models.drafts.items():
        progress(f"measuring rounds with the draft {name} of {sizes} rows")
        generator = SpeculativeGenerator(models.target, models.tokenizer, draft=draft)
        found = generator.calibrate_batches(sizes, contexts=[max(1, context // 2)])
        for count, table in found.items():
            for costs in table.values():
                each = "  ".join(f"{n}: {own * 1e3:.1f}" for n, own in costs.items())
                progress(f"{count} rows, ms by length: {each}")


def _jobs(
    tokenizer: Any, group: str, rows: int, longest: int, repeats: int
) -> list[list[list[int]]]:
    """Return the prompts of each job, different ones; few texts begin further on."""
    texts = [tokenizer.encode(text.text) for text in texts_of(group, 1 << 20)]
    prompts = []
    for number in range(rows * repeats):
        text, cut = texts[number % len(texts)], 7 * (number // len(texts))
        prompts.append(text[cut % max(1, len(text) // 2) :][:longest])
    return [prompts[n * rows : (n + 1) * rows] for n in range(repeats)]


def _measured(
    arms: "list[Arm]", jobs: "list[Job]", repeats: int, what: tuple[Any, int, str]
) -> dict[str, Any]:
    """Run one case, check its texts, print its table and return its values."""
    from batch_arms import run_in_turns

    from mlx_speculation.cli.measure import Spread

    model, rows, group = what
    progress(f"batch {rows}, {group}")
    run_in_turns(arms, jobs, repeats)
    plain = [one.speed for one in arms[0].runs]
    found: dict[str, Any] = {"batch": rows, "group": group, "arms": []}
    print(f"\nbatch {rows}, {group}: mlx-lm {Spread.of(plain).median:.0f} tokens/s")
    print(f"{'':12} {'x mlx-lm (spread)':24} accepted  forwards  rows  near-ties")
    for arm in arms:
        ties = _check(model, arms, arm, jobs, group)
        pairs = zip(arm.runs, plain, strict=True)
        ratio = Spread.of([one.speed / other for one, other in pairs])
        values: dict[str, Any] = {
            "arm": arm.name,
            "ratio": [ratio.median, ratio.low, ratio.high],
            "speeds": [one.speed for one in arm.runs],
            "near_ties": ties,
        }
        line = f"{arm.name:12} {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        stats = [one.stats for one in arm.runs if one.stats is not None]
        if stats:
            drafted = sum(one.drafted for one in stats)
            values["accepted"] = sum(one.accepted for one in stats) / max(1, drafted)
            values["forwards"] = sum(one.forwards for one in stats)
            values["rows"] = sum(one.row_rounds for one in stats) / values["forwards"]
            line = f"{line:38}{values['accepted']:7.0%}{values['forwards']:10}"
            line = f"{line}{values['rows']:7.1f}{ties:6}"
        print(line)
        found["arms"].append(values)
    return found


def _check(
    model: Any, arms: "list[Arm]", arm: "Arm", jobs: "list[Job]", group: str
) -> int:
    """Return the near-ties of an arm's texts; end where one is not the same."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlx_speculation.engine.equivalence.texts import find_parting
    from mlx_speculation.models import logit_width
    from mlx_speculation.samplers import Chooser

    weights: Any = tree_flatten(model.parameters())
    dtype = weights[0][1].dtype
    most = OFF_BY if dtype == mx.float32 else HALF_OFF_BY
    ties = 0
    reference = arms[0] if jobs[0].temperature == 0 else arms[1]
    if jobs[0].temperature and arm is arms[0]:
        return 0  # its draws are its own
    for job, one, other in zip(jobs, arm.runs, reference.runs, strict=False):
        rows = zip(job.prompts, job.samplings, other.texts, one.texts, strict=True)
        for prompt, sampling, expected, got in rows:
            if expected == got:
                continue
            chooser = Chooser(sampling.with_seed(), logit_width(model))
            parting = find_parting(
                model, chooser, prompt, expected, got, width=arm.width, places=PLACES
            )
            assert parting is not None
            if not parting.near_tie and len(expected) == len(got):
                # A batch may round further off than a single row's widths do.
                assert parting.margin < most, f"{group}, {arm.name}: {parting}"
            ties += 1
    return ties


if __name__ == "__main__":
    run(app)
