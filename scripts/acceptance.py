"""How often drafts are right, by position: every draft, length and temperature.

No time is measured, and the counts are the same in every run and on a busy machine. All
texts are compared with plain decoding's, but for those of other rules than keyed ones.
Rates by position (in the JSON line) are over all drafts: position i counts where i
tokens or more were accepted. A draft shorter than that counts as one that was wrong
there. Length is 1 + accepted / drafts, with the bonus; tokens a round counts rounds
without a draft too.

With --rules the draft model's tokens are accepted by each rule in turn, beside what is
expected from the probabilities of draft and target (bench/expected.py). The two differ
by chance only: `apart` is in standard errors, and beyond 4 something is wrong.

    python scripts/acceptance.py --draft-length 4 --draft-length 8
    python scripts/acceptance.py --rules --temperature 0.8 --prompts 3
    python scripts/acceptance.py --draft model --draft model@4 --draft model~1024
"""

from contextlib import nullcontext
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, get_args

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
    Tokens,
)
from bench.prompts import bundled
from bench.report import reported
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from bench.arms import Job
    from bench.models import Bench
    from mlx_speculation import SpeculativeGenerator

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def acceptance(
    context: typer.Context,
    target: Targets = None,
    draft_model: DraftModel = "draft",
    draft: Drafts = None,
    draft_length: Lengths = None,
    group: Groups = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, help="By default 0.")
    ] = None,
    rules: Annotated[bool, typer.Option(help="Each rule, and what is expected.")] = (
        False
    ),
    tokens: Tokens = 128,
    prompts: Prompts = 4,
    seed: Seed = 0,
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Count accepted tokens, after checking the text."""
    with reported(context) as report:
        from bench.models import Bench
        from bench.series import jobs_of
        from mlx_speculation.samplers import Acceptance

        for name, warmth in product(target or ["dense"], temperature or [0.0]):
            bench = Bench.of(name, draft_model)
            drafts = ["model"] if rules else draft or bench.default_drafts
            for each, rule in product(
                drafts, get_args(Acceptance)[: None if rules else 1]
            ):
                generator = bench.generator(each, acceptance=rule)
                for text, questions in bundled(group, prompts).items():
                    options: Any = {"temperature": warmth, "seed": seed}
                    jobs = [*jobs_of(bench, questions, tokens=tokens, **options)]
                    for length in draft_length or [4]:
                        report.say(f"{name}: {each}, {text}, {warmth:g}, k={length}")
                        counted = count(bench, generator, jobs, length, rule, rules)
                        report.add(
                            target=bench.name,
                            draft=each,
                            group=text,
                            temperature=warmth,
                            rule=rule,
                            k=length,
                            **counted,
                        )


def count(
    bench: "Bench",
    generator: "SpeculativeGenerator",
    jobs: "list[Job]",
    length: int,
    rule: Any,
    expect: bool,
) -> dict[str, Any]:
    """Continue prompts with drafts; return the counts of all together.

    Raises:
        AssertionError: a text is not plain decoding's, or a drafter has failed.
    """
    from bench.expected import watched
    from bench.series import total

    found, ties = [], 0
    with watched(rule) if expect else nullcontext() as expected:
        for job in jobs:
            options: Any = {"max_tokens": job.tokens, "sampling": job.sampling}
            options["stop_tokens"] = ()
            result = generator.generate(job.prompt, draft_length=length, **options)
            assert not result.stats.drafter_faults, result.stats.drafter_faults
            found.append(result.stats)
            plain = bench.plain_text(job.prompt, job.tokens, job.sampling)
            if rule == "keyed" and result.tokens != plain:
                parting = bench.parting(
                    job.prompt, job.sampling, plain, result.tokens, width=length + 1
                )
                assert parting is not None
                assert parting.near_tie, f"not the text of plain decoding: {parting}"
                ties += 1
    counts = total(found)
    row: dict[str, Any] = {
        "accepted": counts.acceptance_rate,
        "length": counts.mean_accepted_length,
        "tokens_a_round": counts.tokens_per_round,
        "drafts": counts.drafts,
        "near_ties": ties,
        "by_position": list(counts.accepted_per_position),
        "counts": {"drafted": counts.drafted, "accepted": counts.accepted},
    }
    if expected is not None:
        row |= {"expected": expected.length, "apart": expected.apart}
    return row


if __name__ == "__main__":
    run(app)
