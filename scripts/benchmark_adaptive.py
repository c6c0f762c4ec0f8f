"""Measures the worst cases of draft lengths that are chosen by measurement.

wrong      a draft model that always proposes what it holds for the least probable, over
           plain decoding: what trying costs where nothing can be gained
drafters   every drafter of the target over plain decoding; with --blas stock rows cost
           as much as steps, and hardly any draft pays
requests   short requests that change their group of prompts each time, over the best
           fixed length of each group

All are calibrated before. Where drafting is parked, what a draft has missed is read
when it is tried again: that is in the time, and in the shares of it that went into
trials, reviews and measurements, which --explain prints, at the price of a hundredth of
the speed. Rules as in the finals of compare.py: texts are checked, arms take turns in
slices of tokens, and ratios are to the faster plain decoding in the same pass. A ratio
of requests is one of times in all, without prefill and first slices.

The last line on standard output is one JSON object with everything.

    python scripts/benchmark_adaptive.py
    python scripts/benchmark_adaptive.py --blas stock --requests 0
    python scripts/benchmark_adaptive.py --target dense --temperature 0 --passes 0
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from benchmark_options import (
    TARGETS,
    TEMPERATURES,
    Blas,
    DraftModel,
    Json,
    Seed,
    Target,
    Temperature,
    progress,
)

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from benchmark_case import Case
    from compare_demands import Demand

LENGTHS = [2, 4, 6, 8]
LEAST = 48  # tokens; the first slice is not timed, nor is the round that ends it

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure; the names are those of the options."""

    targets: list[str]
    drafts: list[str]
    draft_model: str
    temperatures: list[float]
    draft_lengths: list[int]
    tokens: int
    passes: int
    requests: int
    request_tokens: int
    seed: int
    explain: bool = False


@app.command()
def benchmark(
    target: Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="Drafters of the requests; by default the draft model."),
    ] = None,
    draft_model: DraftModel = None,
    temperature: Temperature = None,
    draft_length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="To compare with; by default 2, 4, 6 and 8."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=LEAST, help="Of each text.")] = 512,
    passes: Annotated[
        int, typer.Option(min=0, help="Of wrong and drafters; 0: none.")
    ] = 3,
    requests: Annotated[int, typer.Option(min=0, help="That change their group.")] = 20,
    request_tokens: Annotated[
        int, typer.Option(min=LEAST, help="Of each request.")
    ] = 128,
    seed: Seed = 0,
    explain: Annotated[
        bool, typer.Option(help="Print what went into trials; rounds are slower so.")
    ] = False,
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Measure lengths by measurement where they can only lose, after checking texts."""
    settings = Settings(
        targets=target or TARGETS,
        drafts=draft or ["model"],
        draft_model=draft_model or "draft",
        temperatures=temperature or TEMPERATURES,
        draft_lengths=sorted(set(draft_length or LENGTHS)),
        tokens=tokens,
        passes=passes,
        requests=requests,
        request_tokens=request_tokens,
        seed=seed,
        explain=explain,
    )
    chosen = use_blas(blas)
    progress(f"BLAS: {chosen.detail}")
    with tempfile.TemporaryDirectory() as folder:
        # What earlier runs measured must not decide what this one measures.
        os.environ["MLX_SPECULATION_CACHE"] = folder
        report = {"blas": asdict(chosen), **_report(settings)}
    written = json.dumps(report)
    if json_file is not None:
        json_file.write_text(written + "\n", encoding="utf-8")
    print(written)


def _report(settings: Settings) -> dict[str, Any]:
    """Run everything, print the tables, and return the JSON values."""
    from adaptive_cases import Adaptive
    from benchmark_report import as_json, print_case
    from compare_demands import print_demands

    from mlx_speculation.environment import machine, versions

    cases: list[Case] = []
    demands: list[Demand] = []
    costs: dict[str, Any] = {}
    for name in settings.targets:
        adaptive = Adaptive.load(name, settings)
        costs[adaptive.name] = adaptive.costs
        for temperature in settings.temperatures:
            if settings.passes:
                case = adaptive.over_plain(temperature)
                print_case(case)
                cases.append(case)
                demands += adaptive.demands_over_plain(case)
            for drafter in settings.drafts if settings.requests else ():
                groups = adaptive.requests(drafter, temperature)
                cases += groups
                demands.append(adaptive.demand_of_requests(groups))
    print_demands(demands)
    shown = replace(
        settings,
        targets=[Path(name).name for name in settings.targets],
        draft_model=Path(settings.draft_model).name,
    )
    return {
        "machine": machine(),
        "versions": versions(),
        "arguments": asdict(shown),
        "round_seconds": costs,
        "demands": [demand.as_json() for demand in demands],
        "results": as_json(cases),
    }


if __name__ == "__main__":
    run(app)
