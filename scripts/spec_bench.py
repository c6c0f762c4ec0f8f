"""Ways to decode, by turns: plain, each draft at fixed and adaptive lengths, mlx-lm's.

All arms decode the same prompt at the same time, a slice of tokens each while the
others stand still. The prefill and the first token are not in tokens per second; they
have a column of their own, and `x whole` is of all the time. `x plain` is over the
faster plain decoding, ours or mlx-lm's `generate_step`; "length" is the mean accepted
length. No figure is printed unless all texts are plain decoding's, up to near-ties
(docs/exactness.md).

Prompts are the bundled ones, or those of a question file in Spec-Bench's layout: a line
is a JSON object with `question_id`, `category` and `turns`. Turns go through the chat
template of the target, later ones behind the answers of plain decoding, and an answer
ends where the model ends it.

    python scripts/spec_bench.py
    python scripts/spec_bench.py --target dense --group code --draft lookup
    python scripts/spec_bench.py question.jsonl --target path/of/model --prompts 2 \
        --draft lookup --draft path/of/head%16 --draft lookup+path/of/head

Under mlx.launch the target is spread over the ranks by mlx-lm's `shard`, the draft is
on rank 0 alone, and rank 0 prints:

    mlx.launch --backend nccl -n 2 scripts/spec_bench.py --target path/of/model
"""

from pathlib import Path
from typing import Annotated

import typer

from bench import options as opt
from bench.prompts import bundled, read_questions
from bench.report import reported
from mlx_speculation.cli import run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def spec_bench(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(exists=True, dir_okay=False, help="Questions.")
    ] = None,
    target: opt.Targets = None,
    draft_model: opt.DraftModel = "draft",
    draft: opt.Drafts = None,
    draft_length: opt.Lengths = None,
    mlx_lm_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Of mlx-lm's own speculation.")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option(help="Of the prompts; by default all.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Of each group; of a file, all.")
    ] = None,
    temperature: opt.Temperature = 0.0,
    tokens: opt.Tokens = 144,
    seed: opt.Seed = 0,
    blas: opt.Blas = "auto",
    json_file: opt.Json = None,
) -> None:
    """Compare speeds by turns, after checking the text."""
    try:
        if file is None:
            groups = bundled(group, prompts or 4)
        else:
            groups = read_questions(file, group, prompts or 1 << 20)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with reported(context) as report:
        import mlx.core as mx

        from bench.arms import drafted_arms, mlx_lm_arms, plain_arms
        from bench.models import Bench
        from bench.series import add_groups

        ranks = mx.distributed.init()
        spread = ranks.size() > 1
        report.quiet = ranks.rank() > 0
        report.facts = {"ranks": ranks.size()}
        for name in target or ["dense"]:
            bench = Bench.of(name, draft_model, group=ranks if spread else None)
            drafts = draft or bench.default_drafts
            arms = plain_arms(bench) + drafted_arms(bench, drafts, draft_length or [4])
            add_groups(
                report,
                bench,
                arms + mlx_lm_arms(bench, mlx_lm_length or []),
                groups,
                tokens=tokens,
                temperature=temperature,
                seed=seed,
            )


if __name__ == "__main__":
    run(app)
