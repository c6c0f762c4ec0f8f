"""A target that is spread over ranks, by turns, and what a sum over the ranks takes.

The target is spread with mlx-lm's `shard`; the draft is on rank 0 alone, as in every
generator on ranks. All arms decode the same prompts by turns, as in speed.py, and every
text is compared with plain decoding on the same ranks. Without a launcher it runs on
one rank, to compare with. Rank 0 prints.

    mlx.launch --backend ring -n 2 scripts/distributed.py --draft-length 4
    mlx.launch --backend nccl -n 2 scripts/distributed.py --target path/of/model
"""

from functools import partial
from typing import Annotated, Any

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
    Target,
    Temperature,
    Tokens,
)
from bench.prompts import bundled
from bench.report import reported
from bench.turns import Spread, seconds_in_turns
from mlx_speculation.cli import run

# Rows of a sum over the ranks in a forward, each as wide as the model; sums in a row.
ROWS, SUMS = (1, 5, 17), 64

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def distributed(
    context: typer.Context,
    target: Target = "dense",
    draft_model: DraftModel = "draft",
    draft: Drafts = None,
    draft_length: Lengths = None,
    mlx_lm_length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of mlx-lm's speculation, its draft on every rank."),
    ] = None,
    group: Groups = None,
    temperature: Temperature = 0.0,
    tokens: Tokens = 128,
    prompts: Prompts = 4,
    seed: Seed = 0,
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Compare ways to decode on all ranks, after checking the text."""
    with reported(context) as report:
        import mlx.core as mx

        from bench.arms import drafted_arms, mlx_lm_arms, plain_arms
        from bench.models import Bench
        from bench.series import add_groups

        ranks = mx.distributed.init()
        report.quiet = ranks.rank() > 0
        bench = Bench.of(target, draft_model, group=ranks)
        model: Any = bench.model
        report.facts = {
            "ranks": ranks.size(),
            "sums_ms": sums_of(ranks, model.args.hidden_size),
        }
        drafts, lengths = draft or ["model", "lookup"], draft_length or [4]
        arms = plain_arms(bench) + drafted_arms(bench, drafts, lengths)
        add_groups(
            report,
            bench,
            arms + mlx_lm_arms(bench, mlx_lm_length or []),
            bundled(group, prompts),
            tokens=tokens,
            temperature=temperature,
            seed=seed,
        )


def sums_of(ranks: Any, width: int) -> dict[str, Spread]:
    """Return milliseconds of a sum over the ranks, by its rows.

    Each alone, until it is there, and as a part of many of which each needs the last.
    """
    import mlx.core as mx

    def sums(x: Any, count: int) -> None:
        for _ in range(count):
            x = mx.distributed.all_sum(x, group=ranks)
        mx.eval(x)

    acts, counts = {}, {"alone": 1, "in a row": SUMS}
    for rows in ROWS:
        x = mx.zeros((rows, width), mx.bfloat16)
        for name, count in counts.items():
            acts[f"{rows} rows, {name}"] = partial(sums, x, count)
    taken = seconds_in_turns(acts, 10, warm_up=2)
    return {
        name: Spread.of(
            [1e3 * each / counts[name.partition(", ")[2]] for each in times]
        )
        for name, times in taken.items()
    }


if __name__ == "__main__":
    run(app)
