"""A question file in Spec-Bench's layout, by turns: each group, and all together.

A line of the file is a JSON object with `question_id`, `category` and `turns`. Turns go
through the chat template of the target, later ones behind the answers of plain
decoding, and an answer ends where the model ends it. Arms are plain decoding, ours and
mlx-lm's; each draft at fixed and adaptive lengths; with --draft-model that model, and
mlx-lm's own speculation with it. For the columns see speed.py; "length" is the mean
accepted length: tokens of a round with a draft.

    python scripts/spec_bench.py question.jsonl --target path/of/model
    python scripts/spec_bench.py question.jsonl --target path/of/model --questions 2 \
        --draft lookup --draft path/of/head --draft lookup+path/of/head
    python scripts/spec_bench.py question.jsonl --target path/of/model \
        --draft path/of/head --draft path/of/head%16 --draft-length 7
"""

from pathlib import Path
from typing import Annotated

import typer

from bench.options import (
    Blas,
    Drafts,
    Json,
    Lengths,
    Seed,
    Target,
    Temperature,
    Tokens,
)
from bench.prompts import read_questions
from bench.report import reported
from mlx_speculation.cli import run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def spec_bench(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    target: Target = "dense",
    draft_model: Annotated[
        Path | None, typer.Option(help='The folder of the draft "model".')
    ] = None,
    draft: Drafts = None,
    draft_length: Lengths = None,
    group: Annotated[
        list[str] | None, typer.Option(help="By default all of the file.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Of each group.")] = 1 << 20,
    temperature: Temperature = 0.0,
    tokens: Tokens = 256,
    seed: Seed = 0,
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Compare speeds on the questions of a file, after checking the text."""
    try:
        groups = read_questions(file, group, questions)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    lengths = draft_length or [4]
    with reported(context) as report:
        from bench.arms import drafted_arms, mlx_lm_arms, plain_arms
        from bench.models import Bench
        from bench.series import add_groups

        bench = Bench.of(target, str(draft_model or "draft"))
        models = ["model"] if draft_model else []
        arms = plain_arms(bench)
        arms += drafted_arms(bench, draft or [*models, "lookup"], lengths)
        arms += mlx_lm_arms(bench, lengths if draft_model else [])
        add_groups(
            report,
            bench,
            arms,
            groups,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
        )


if __name__ == "__main__":
    run(app)
