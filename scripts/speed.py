"""Ways to decode, by turns: plain, each draft at fixed and adaptive lengths, mlx-lm's.

All arms decode the same prompt at the same time, a slice of tokens each while the
others stand still. The prefill and the first token are not in tokens per second; they
have a column of their own, and `x whole` is of all the time. `x plain` is over the
faster plain decoding, ours or mlx-lm's `generate_step`. No figure is printed unless all
texts are plain decoding's, up to near-ties (docs/exactness.md).

    python scripts/speed.py
    python scripts/speed.py --target dense --group code --draft lookup --draft-length 8
    python scripts/speed.py --target path/of/model --draft lookup --draft path/of/head
"""

from typing import Annotated

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

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def speed(
    context: typer.Context,
    target: Targets = None,
    draft_model: DraftModel = "draft",
    draft: Drafts = None,
    draft_length: Lengths = None,
    mlx_lm_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Of mlx-lm's own speculation.")
    ] = None,
    group: Groups = None,
    temperature: Temperature = 0.0,
    tokens: Tokens = 144,
    prompts: Prompts = 4,
    seed: Seed = 0,
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Compare speeds by turns, after checking the text."""
    with reported(context) as report:
        from bench.arms import drafted_arms, mlx_lm_arms, plain_arms
        from bench.models import Bench
        from bench.series import add_groups

        for name in target or ["dense"]:
            bench = Bench.of(name, draft_model)
            drafts = draft or bench.default_drafts
            arms = plain_arms(bench) + drafted_arms(bench, drafts, draft_length or [4])
            add_groups(
                report,
                bench,
                arms + mlx_lm_arms(bench, mlx_lm_length or []),
                bundled(group, prompts),
                tokens=tokens,
                temperature=temperature,
                seed=seed,
            )


if __name__ == "__main__":
    run(app)
