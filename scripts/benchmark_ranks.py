"""Measures speculation of a target that is spread over ranks, by turns of some tokens.

The demo target, as it is or grown to size (growing.py), is spread with mlx-lm's
`shard`; the draft is on rank 0 alone, as in every generator on ranks. All arms decode
the same prompts by turns, as in benchmark_turns.py, and every text is checked against
plain decoding on the same ranks. Without a launcher it runs on one rank, to compare
with. Beside it: what a sum over the ranks takes, one by one and in a row of them.

Rank 0 prints; the last line on its standard output is one JSON object.

    mlx.launch --backend ring -n 2 scripts/benchmark_ranks.py --draft-length 4
    mlx.launch --backend nccl -n 2 scripts/benchmark_ranks.py --shape 8B --draft lookup
"""

import json
import time
from statistics import median
from typing import Annotated, Any

import typer
from benchmark_options import GROUPS, Group, folder_of, progress, texts_of

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

# Rows of a sum over the ranks in a forward, each as wide as the model; sums in a row.
ROWS, SUMS = (1, 5, 17), 64
AS_IT_IS = "as it is"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmark(
    shape: Annotated[
        str, typer.Option(help="'as it is', or 1B or 8B in bfloat16.")
    ] = AS_IT_IS,
    draft: Annotated[
        list[str] | None, typer.Option(help="model or lookup; by default both.")
    ] = None,
    draft_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Beside lengths by measurement.")
    ] = None,
    mlx_lm_length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of mlx-lm's speculation, its draft on every rank."),
    ] = None,
    group: Group = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    tokens: Annotated[int, typer.Option(min=48, help="Of each arm.")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="Of each group.")] = 4,
) -> None:
    """Compare ways to decode on all ranks."""
    use_blas("auto")
    import mlx.core as mx
    from benchmark_arms import Models, jobs_of
    from benchmark_case import Case, Series, run_case
    from benchmark_turns import make_arms, ratios, show

    from mlx_speculation import SpeculativeGenerator

    ranks = mx.distributed.init()
    first = ranks.rank() == 0
    target, tokenizer, model = _models(shape, ranks)
    sums = sums_of(ranks, target.args.hidden_size)
    generators: dict[str, Any] = {}
    for name in draft or ["model", "lookup"]:
        member = {"model": model, "lookup": "lookup"}[name] if first else None
        generators[name] = SpeculativeGenerator(
            target, tokenizer, draft=member, group=ranks
        )
        costs = generators[name].calibrate()
        if first:
            shown = {n: round(seconds * 1e3, 2) for n, seconds in costs[0].items()}
            progress(f"{name}: ms of a round by length: {shown}")
    plain = SpeculativeGenerator(target, tokenizer, group=ranks)
    models = Models(target, model, plain, generators.get("model", plain))
    arms = make_arms(models, generators, draft_length or [], mlx_lm_length or [])
    results = []
    for name in group or GROUPS:
        texts = texts_of(name, prompts)
        jobs = jobs_of(models, texts, tokens, temperature, 0)
        sources = [text.source for text in texts]
        case = Case("ranks", name, temperature, sources, [Series(arm) for arm in arms])
        run_case(case, models, jobs, len(jobs), _told(first), turns=True)
        results.append({"target": f"{ranks.size()} ranks", "group": name})
        results[-1] |= ratios(case)
        if first:
            show(results[-1])
    settings = {"ranks": ranks.size(), "shape": shape, "sums_ms": sums}
    if first:
        print(json.dumps({**settings, "results": results}))


def _models(shape: str, ranks: Any) -> tuple[Any, Any, Any]:
    """Return this rank's part of the target, the tokenizer, and the draft model."""
    import mlx.core as mx
    from growing import SHAPES, grow

    from mlx_speculation import load
    from mlx_speculation.models.sharding import spread

    target: Any
    target, tokenizer = load(folder_of("dense"))
    if shape not in SHAPES:
        raise typer.BadParameter(
            f"the shapes are {', '.join(SHAPES)}; there is no {shape!r}"
        )
    if shape != AS_IT_IS:
        target = grow(target, SHAPES[shape])
    if ranks.size() > 1:
        spread(target, ranks)
        mx.eval(target.parameters())
        mx.clear_cache()
    return target, tokenizer, load(folder_of("draft"))[0]


def _told(first: bool) -> Any:
    return progress if first else lambda line: None


def sums_of(ranks: Any, width: int) -> dict[int, tuple[float, float]]:
    """Return milliseconds of a sum over the ranks, by its rows.

    Each alone, until it is there, and as a part of many of which each needs the last.
    """
    import mlx.core as mx

    found = {}
    for rows in ROWS:
        x = mx.zeros((rows, width), mx.bfloat16)
        alone, together = [], []
        for _ in range(12):
            begun = time.perf_counter()
            mx.eval(mx.distributed.all_sum(x, group=ranks))
            alone.append(time.perf_counter() - begun)
            begun, y = time.perf_counter(), x
            for _ in range(SUMS):
                y = mx.distributed.all_sum(y, group=ranks)
            mx.eval(y)
            together.append((time.perf_counter() - begun) / SUMS)
        found[rows] = (
            round(median(alone[2:]) * 1e3, 4),
            round(median(together[2:]) * 1e3, 4),
        )
    return found


if __name__ == "__main__":
    run(app)
