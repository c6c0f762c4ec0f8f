"""Compares plain, speculative and adaptive decoding: ours, mlx-lm's, transformers'.

On each target, group of prompts and temperature, in one process, by turns:

    ours           plain; each drafter at fixed lengths; each drafter with lengths by
                   measurement ("auto"), calibrated before
    mlx-lm         `generate_step`; `speculative_generate_step` with the draft model
    transformers   plain and assisted generation on the same weights, under torch in
                   float32, checked by their logits; where it refuses, the reason

First a survey of all arms on a few prompts, one run after the other, then a final
between those that matter, over at least 1,000 tokens: the best drafter at its two best
lengths and the second at its best, both with lengths by measurement too, the draft
model and mlx-lm's speculation at their best lengths, and both plain decodings. In a
final all arms decode the same prompt at the same time, by turns of some tokens.

No figure of a case is printed unless our texts equal plain decoding's in every pass (at
temperature 0 also mlx-lm's plain text), up to near-ties that rounding explains, see
mlx_speculation.engine.equivalence.texts. Tokens per second leave out prefill and the
first round, or the first turn. Ratios are medians over passes of the ratio to the
faster plain decoding, ours or mlx-lm's, in the same pass. Our plain decoding against
mlx-lm's: benchmark_plain.py.

The last line on standard output is one JSON object with everything.

    python scripts/compare.py --plot compare.png --json compare.json
    python scripts/compare.py --target dense --group edit --draft model --temperature 0
    python scripts/compare.py --final-passes 0 --no-torch     # the survey alone
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from benchmark_options import (
    GROUPS,
    TARGETS,
    TEMPERATURES,
    Blas,
    DraftModel,
    Group,
    Head,
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
    from benchmark_plain import PlainRatio
    from compare_target import Compared

    from mlx_speculation.cli.plots import Panel

LENGTHS = [1, 2, 4, 6, 8, 12, 16]
MLX_LM_LENGTHS = [2, 4, 6, 8, 12]
TORCH_LENGTHS = [4]
DRAFTS = ["model", "compiled", "mtp", "eagle", "assistant", "dflash", "lookup"]

# An assertion is told by its last line; typer would frame the whole stack.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure; the names are those of the options."""

    targets: list[str]
    drafts: list[str]
    draft_model: str
    heads: list[str]
    groups: list[str]
    temperatures: list[float]
    draft_lengths: list[int]
    tokens: int
    passes: int
    final_tokens: int
    final_passes: int
    plain_runs: int
    torch: bool
    seed: int
    mlx_lm_lengths: list[int] = field(default_factory=lambda: MLX_LM_LENGTHS)
    torch_lengths: list[int] = field(default_factory=lambda: TORCH_LENGTHS)

    @property
    def least_tokens(self) -> int:
        """The first round is not timed, so that a second one is needed."""
        return 2 * (max(*self.draft_lengths, *self.mlx_lm_lengths) + 1)


@app.command()
def compare(
    target: Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="model, compiled (the same, its steps compiled), mtp, eagle, "
            "assistant, lookup or cascade; by default all that there are, but for the "
            "cascade."
        ),
    ] = None,
    draft_model: DraftModel = None,
    head: Head = None,
    group: Group = None,
    temperature: Temperature = None,
    draft_length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="By default 1, 2, 4, 6, 8, 12 and 16."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of each arm in the survey.")] = 64,
    passes: Annotated[
        int, typer.Option(min=1, help="Of the survey; each takes the next prompt.")
    ] = 2,
    final_tokens: Annotated[int, typer.Option(help="Of each arm in the final.")] = 144,
    final_passes: Annotated[
        int, typer.Option(min=0, help="Of the final; 0: none.")
    ] = 7,
    plain_runs: Annotated[
        int, typer.Option(min=0, help="Runs of plain decoding against mlx-lm's.")
    ] = 3,
    torch: Annotated[bool, typer.Option(help="transformers' arms too.")] = True,
    seed: Seed = 0,
    blas: Blas = "auto",
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the survey: one picture for each target."),
    ] = None,
    json_file: Json = None,
) -> None:
    """Compare all ways to decode, after checking the text."""
    settings = Settings(
        targets=target or TARGETS,
        drafts=draft or DRAFTS,
        draft_model=draft_model or "draft",
        heads=head or [],
        groups=group or GROUPS,
        temperatures=temperature or TEMPERATURES,
        draft_lengths=sorted(set(draft_length or LENGTHS)),
        tokens=tokens,
        passes=passes,
        final_tokens=final_tokens,
        final_passes=final_passes,
        plain_runs=plain_runs,
        torch=torch,
        seed=seed,
    )
    if min(tokens, final_tokens) < settings.least_tokens:
        raise typer.BadParameter(
            f"{min(tokens, final_tokens)} tokens are less than two rounds of the "
            f"longest draft; give --tokens {settings.least_tokens} or more"
        )
    if plot is not None:
        from mlx_speculation.cli.plots import check_plot

        check_plot(plot)
    chosen = use_blas(blas)
    progress(f"BLAS: {chosen.detail}")
    with tempfile.TemporaryDirectory() as folder:
        # What earlier runs measured must not decide what this one measures.
        os.environ["MLX_SPECULATION_CACHE"] = folder
        report = {"blas": asdict(chosen), **_report(settings, plot)}
    written = json.dumps(report)
    if json_file is not None:
        json_file.write_text(written + "\n", encoding="utf-8")
    print(written)


def _report(settings: Settings, plot: Path | None) -> dict[str, Any]:
    """Run everything, print the tables, draw, and return the JSON values."""
    from benchmark_report import as_json, print_case, print_summary
    from compare_demands import DEFINITIONS, demands_of, print_demands
    from compare_target import Compared

    from mlx_speculation.environment import machine, versions

    surveys: list[Case] = []
    finals: list[Case] = []
    plain: list[PlainRatio] = []
    costs: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for name in settings.targets:
        compared = Compared.load(name, settings)
        costs[compared.name], notes[compared.name] = compared.costs, compared.note
        progress(compared.note)
        plain += compared.plain_ratios()
        panels: list[Panel] = []
        for group, temperature in product(settings.groups, settings.temperatures):
            survey = compared.survey(group, temperature)
            print_case(survey)
            surveys.append(survey)
            panels.append(compared.panel(survey))
            if settings.final_passes:
                finals.append(compared.final(survey))
                print_case(finals[-1], "final: ")
        if plot is not None:
            _draw(panels, settings, compared, plot)
    print_summary(finals or surveys, plain)
    demands = demands_of(finals or surveys, plain)
    print_demands(demands)
    print(DEFINITIONS)
    shown = replace(
        settings,
        targets=[Path(name).name for name in settings.targets],
        draft_model=Path(settings.draft_model).name,
        heads=[Path(name).name for name in settings.heads],
    )
    return {
        "machine": machine(),
        "versions": versions(),
        "arguments": asdict(shown),
        "definitions": DEFINITIONS,
        "transformers": notes,
        "round_seconds": costs,
        "plain_over_mlx_lm": [asdict(ratio) for ratio in plain],
        "demands": [demand.as_json() for demand in demands],
        "finals": as_json(finals),
        "results": as_json(surveys),
    }


def _draw(
    panels: "list[Panel]", settings: Settings, compared: "Compared", plot: Path
) -> None:
    """Draw the survey of one target: groups side by side, temperatures below."""
    from mlx_speculation.cli.plots import save_plot

    columns = len(settings.groups)
    each = len(settings.temperatures)
    ordered = [panels[each * c + r] for r in range(each) for c in range(columns)]
    path = plot.with_stem(f"{plot.stem}-{compared.name}")
    title = (
        f"{compared.name}, {settings.tokens} tokens a pass, {settings.passes} passes"
    )
    save_plot(ordered, path, title=title, columns=columns)
    progress(f"drawn: {path}")


if __name__ == "__main__":
    run(app)
