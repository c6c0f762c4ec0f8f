"""Checks that a model verifies a draft at once as it would token by token.

A greedy text is generated, one token a forward. At several places of it the same
draft, which is the text's continuation with one wrong token put in, is verified at
once (one forward of k + 1 rows) and one by one (k + 1 forwards of one row). Both are
isolated: they begin with the same caches and write nothing to them. Printed are the
largest difference of a logit at each place, and the first row that chooses another
token, with both ids and the margin of its two best logits.

    verdict           what it means                                          status
    identical         all logits are equal bit for bit                       0
    same choices      logits differ, and every row chooses the same token    0
    near-ties         rows differ whose margin is at most --tolerance        0
    different         a row differs by more than that                        1

Rounding alone makes rows differ where two tokens are almost equally good, on most
GPUs and with most BLAS libraries: a margin of the size of the largest difference is
such a tie, a margin many times larger is a fault. The last line on standard output is
one JSON object with everything.

    python scripts/check_identity.py hybrid
    python scripts/check_identity.py path/of/model --prompt "def f(n):" --tokens 200
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts

if TYPE_CHECKING:
    from mlx_speculation.engine.equivalence.report import First
    from mlx_speculation.engine.equivalence.rows import Place

BUNDLED = ("dense", "sliding", "hybrid", "draft")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def check_identity(
    model: Annotated[
        str, typer.Argument(help="dense, sliding, hybrid, draft, a folder or a repo.")
    ],
    prompt: Annotated[
        str | None, typer.Option(help="By default the first bundled one.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of greedy text.")] = 64,
    draft_length: Annotated[int, typer.Option(min=1, help="Tokens of a draft.")] = 4,
    places: Annotated[int, typer.Option(min=1, help="Drafts, over the text.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="For the wrong tokens.")] = 0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Margin up to which a tie may differ.")
    ] = 0.0,
    sliding: Annotated[
        Literal["slack", "native"], typer.Option(help="Caches for sliding windows.")
    ] = "slack",
    blas: Annotated[
        BlasName, typer.Option(help="What multiplies float32 on a Linux CPU.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the JSON object here too.")
    ] = None,
) -> None:
    """Verify drafts at once and one by one, and compare every row."""
    if tokens < draft_length:
        raise typer.BadParameter(
            f"{tokens} tokens are less than a draft; give --tokens {draft_length} or "
            "more"
        )
    chosen = use_blas(blas)
    typer.secho(f"BLAS: {chosen.detail}", err=True, dim=True)
    from mlx_speculation.engine.equivalence.report import judge
    from mlx_speculation.environment import machine, versions

    folder = demo_models()[model] if model in BUNDLED else model
    text = demo_prompts()[0].text if prompt is None else prompt
    options = {"draft_length": draft_length, "places": places, "seed": seed}
    found = _compare(folder, text, tokens, sliding=sliding, **options)
    result = judge(found, tolerance)
    if result.first is not None:
        print(f"first: {result.first}")
    print(result)
    report = {
        "machine": machine(),
        "versions": versions(),
        "blas": asdict(chosen),
        "arguments": {
            "model": Path(model).name,
            "tokens": tokens,
            **options,
            "tolerance": tolerance,
            "sliding": sliding,
        },
        "verdict": result.verdict,
        "rows": result.rows,
        "differing_rows": result.differing_rows,
        "first": _flat(result.first),
        "largest_difference": result.largest_difference,
        "places": [asdict(place) for place in found],
    }
    line = json.dumps(report)
    if json_file is not None:
        json_file.write_text(line + "\n", encoding="utf-8")
    print(line)
    if result.verdict == "different":
        raise typer.Exit(1)


def _compare(
    folder: Path | str, text: str, tokens: int, **options: Any
) -> list["Place"]:
    """Load the model, generate its text, and compare at each place."""
    from mlx_speculation.engine.equivalence.rows import greedy_text, verify_both_ways
    from mlx_speculation.models import load, wired

    model, tokenizer = load(folder)
    begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    prompt = tokenizer.encode(text, add_special_tokens=not begins)
    found = []
    with wired(model):
        generated = greedy_text(model, prompt, tokens)
        for place in verify_both_ways(model, prompt, generated, **options):
            found.append(place)
            print(
                f"token {place.position}: {len(place.rows)} rows, "
                f"{sum(row.differs for row in place.rows)} choose another token, "
                f"logits differ by {place.difference:.3g} at most"
            )
    return found


def _flat(first: "First | None") -> dict[str, Any] | None:
    """Return the first row that differs with its position, as JSON has it."""
    if first is None:
        return None
    return {"position": first.position, **asdict(first.row)}


if __name__ == "__main__":
    run(app)
