"""Measures how many drafted tokens each rule accepts, beside what is expected.

Drafts of a fixed length on held-out prompts, by temperature. In every round the
probabilities of draft and target are kept; from them follows, in closed form, how many
tokens the rule accepts on average (see `expected_acceptance.py`). Counted and promised
differ by chance only, so the difference is given in standard errors: beyond four
something is wrong. No time is taken here.

The last line on standard output is one JSON object with everything.

    python scripts/benchmark_acceptance.py --tokens 128
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, get_args

import typer

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts

TARGETS = ["dense", "sliding", "hybrid"]
TEMPERATURES = [0.5, 0.8, 1.0]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One target, temperature and rule, over all prompts.

    Attributes:
        target: its name.
        temperature: of the sampling.
        rule: "keyed", "rejection" or "block".
        rounds: with a draft.
        rate: accepted over drafted tokens.
        length: mean accepted length: one more than accepted over rounds.
        promised: the mean accepted length that is expected.
        errors: how far the two are apart, in standard errors.
    """

    target: str
    temperature: float
    rule: str
    rounds: int
    rate: float
    length: float
    promised: float
    errors: float


@app.command()
def main(
    target: Annotated[list[str] | None, typer.Option(help="By default all.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0.01)] = None,
    draft_length: Annotated[int, typer.Option(min=1)] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Of each group.")] = 3,
    tokens: Annotated[int, typer.Option(min=8, help="Of each text.")] = 128,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    blas: Annotated[BlasName, typer.Option()] = "auto",
) -> None:
    """Count accepted tokens, and compare with what is expected."""
    use_blas(blas)
    print("| target | temperature | rule | accepted | length | promised | apart |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for name in target or TARGETS:
        for row in _measure(
            name, temperature or TEMPERATURES, draft_length, prompts, tokens, top_p
        ):
            rows.append(row)
            print(
                f"| {row.target} | {row.temperature:g} | {row.rule} | {row.rate:.1%} "
                f"| {row.length:.2f} | {row.promised:.2f} | {row.errors:+.1f} se |",
                flush=True,
            )
    settings = {"draft_length": draft_length, "prompts": prompts, "tokens": tokens}
    report = {**settings, "top_p": top_p, "rows": [asdict(row) for row in rows]}
    print(json.dumps(report))


def _measure(
    name: str,
    temperatures: list[float],
    k: int,
    prompts: int,
    tokens: int,
    top_p: float,
) -> Iterator[Row]:
    from acceptance_rounds import watch
    from benchmark_arms import Job, Models

    from mlx_speculation import Sampling
    from mlx_speculation.models import TokenIds, logit_width
    from mlx_speculation.samplers import Acceptance, Chooser

    folders = demo_models()
    models = Models.load(folders.get(name, Path(name)), folders["draft"])
    ids, width = TokenIds.of(models.plain.tokenizer), logit_width(models.target)
    texts = [
        text
        for group in sorted({prompt.group for prompt in demo_prompts()})
        for text in [p for p in demo_prompts() if p.group == group][:prompts]
    ]
    for temperature, rule in product(temperatures, get_args(Acceptance)):
        drafted: list[int] = []
        accepted: list[float] = []
        expected: list[float] = []
        for seed, text in enumerate(texts):
            sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
            chooser = Chooser(sampling, ids.width, limit=width, missing=ids.missing)
            job = Job(models.encode(text.text), tokens, temperature, seed)
            _, promised = watch(models.target, models.draft, chooser, rule, job, k)
            drafted += promised.drafted
            accepted += promised.accepted
            expected += promised.expected
        apart = [one - other for one, other in zip(accepted, expected, strict=True)]
        spread = stdev(apart) / len(apart) ** 0.5
        yield Row(
            name,
            temperature,
            rule,
            len(accepted),
            sum(accepted) / sum(drafted),
            1 + fmean(accepted),
            1 + fmean(expected),
            fmean(apart) / spread,
        )


if __name__ == "__main__":
    run(app)
