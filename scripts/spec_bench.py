"""Compares plain decoding, drafts of fixed and adaptive lengths, and mlx-lm's drafts.

All arms decode the same prompt, in turns of a few tokens. Tokens per second leave out
the prefill and the first token, which have a column of their own; `x whole` includes
them. `x plain` is the speed over the faster plain decoding, ours or mlx-lm's
`generate_step`. "length" is the mean accepted length. The script fails if a text parts
from that of plain decoding at a token that is no near-tie (docs/exactness.md).

Prompts are the bundled ones, or those of a question file in Spec-Bench's layout
(bench/prompts.py). User messages of a file go through the target's chat template. The
prompt of a later message holds plain decoding's answers to the earlier ones. Answers to
messages end at a stop token, or after `--tokens`.

    python scripts/spec_bench.py
    python scripts/spec_bench.py --target dense --group code --draft lookup
    python scripts/spec_bench.py question.jsonl --target path/of/model --prompts 2 \
        --draft lookup --draft path/of/head%16 --draft lookup+path/of/head

Under mlx.launch the target is spread over the ranks, and rank 0 drafts and prints:

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
        list[int] | None, typer.Option(min=1, help="Lengths of mlx-lm's own drafts.")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option(help="Groups of prompts; by default all.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Per group; by default 4, of a file all.")
    ] = None,
    temperature: opt.Temperature = 0.0,
    tokens: opt.Tokens = 144,
    seed: opt.Seed = 0,
    blas: opt.Blas = "auto",
    json_file: opt.Json = None,
) -> None:
    """Compare the speeds of arms, whose texts are checked."""
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
