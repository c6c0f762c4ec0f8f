"""The tables of the benchmark and its JSON object."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmark_case import Case, Series
from benchmark_plain import PlainRatio
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlx_speculation.cli.measure import Spread

SHOWN = 8  # positions of a draft in the table


def text_of(series: Series, temperature: float) -> str:
    """Say in a few words how the arm's texts compare with our plain decoding."""
    if series.failure is not None:
        return series.failure
    if not series.arm.is_comparable(temperature):
        return "not comparable"
    if series.wrong_from is not None:
        return f"wrong text from token {series.wrong_from}"
    if series.near_ties:
        indices = ", ".join(str(tie.index) for tie in series.near_ties)
        return f"equal up to a near-tie at token {indices}"
    return "equal"


def case_table(case: Case, before: str = "") -> Table:
    """Make the table of one case; `before` stands before its title."""
    table = Table(title=escape(before + str(case)), title_justify="left")
    table.add_column("arm", no_wrap=True)
    for column in ("tokens/s", "min..max", "x plain", "min..max"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("accepted", "length", "rounds", "a round"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("accepted by position, %", no_wrap=True)
    table.add_column("text")
    for series in case.series:
        counts = series.statistics
        drafted = counts.drafts > 0
        table.add_row(
            series.arm.name,
            *_columns(Spread.of(series.speeds) if series.speeds else None, 1),
            *_columns(series.over(case.plain), 2),
            f"{counts.acceptance_rate:.0%}" if drafted else "-",
            f"{counts.mean_accepted_length:.2f}" if drafted else "-",
            str(counts.rounds) if counts.rounds else "-",
            f"{counts.tokens_per_round:.2f}" if counts.rounds else "-",
            _positions(counts.accepted_per_position),
            escape(text_of(series, case.temperature)),
            style="dim" if series.failure or series.wrong_from is not None else None,
        )
    return table


def _positions(rates: Sequence[float]) -> str:
    """Return the first rates in percent, and how many more there are."""
    shown = [f"{100 * rate:.0f}" for rate in rates[:SHOWN]]
    more = [f"+{len(rates) - SHOWN}"] if len(rates) > SHOWN else []
    return " ".join(shown + more)


def _columns(spread: Spread | None, digits: int) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    low, high = f"{spread.low:.{digits}f}", f"{spread.high:.{digits}f}"
    return f"{spread.median:.{digits}f}", f"{low}..{high}"


def summary_table(cases: Sequence[Case]) -> Table:
    """Make the table of the best draft lengths, and of plain against plain."""
    title = "Speed-up over plain at the best fixed draft length"
    table = Table(title=title, title_justify="left")
    for column in ("target", "text", "temperature", "draft"):
        table.add_column(column)
    columns = ("best k", "x plain", "min..max", "accepted", "plain is", "plain/mlx-lm")
    for column in (*columns, "min..max"):
        table.add_column(column, justify="right", no_wrap=True)
    for case in cases:
        best = case.best
        table.add_row(
            escape(case.target),
            case.group,
            f"{case.temperature:g}",
            best.arm.draft,
            str(best.arm.draft_length),
            *_columns(best.over(case.plain), 2),
            f"{best.statistics.acceptance_rate:.0%}",
            case.plain.arm.engine,
            *_columns(case.series[0].over(case.series[1]), 3),
        )
    return table


def print_case(case: Case, before: str = "") -> None:
    """Print the table of a case; `before` stands before its title."""
    console().print(case_table(case, before))


def print_summary(cases: Sequence[Case], plain: Sequence[PlainRatio]) -> None:
    """Print the summary, plain against plain, and the near-ties."""
    out = console()
    out.print(summary_table(cases))
    for ratio in plain:
        out.print(
            f"{escape(ratio.target)}, temperature {ratio.temperature:g}: our plain "
            f"decoding at {ratio.median:.3f} of mlx-lm's speed (quartiles "
            f"{ratio.lower:.3f} and {ratio.upper:.3f}, {ratio.slices} slices)"
        )
    ties = [tie for case in cases for s in case.series for tie in s.near_ties]
    out.print(f"near-ties: {len(ties)}")
    for tie in ties:
        out.print(f"  {tie}", soft_wrap=True)


def console() -> Console:
    """Make a console that leaves tables whole in a file."""
    found = Console(highlight=False)
    if found.is_terminal:
        return found
    return Console(highlight=False, width=160)


def as_json(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the cases as JSON values."""
    return [
        {
            "target": case.target,
            "group": case.group,
            "temperature": case.temperature,
            "prompts": case.sources,
            "plain": case.plain.arm.engine,
            "plain_over_mlx_lm": _spread(case.series[0].over(case.series[1])),
            "best_draft": case.best.arm.draft,
            "best_draft_length": case.best.arm.draft_length,
            "best_speedup": _spread(case.best.over(case.plain)),
            "arms": [_arm(case, series) for series in case.series],
        }
        for case in cases
    ]


def _arm(case: Case, series: Series) -> dict[str, Any]:
    counts = series.statistics
    return {
        "arm": series.arm.name,
        "engine": series.arm.engine,
        "draft": series.arm.draft,
        "draft_length": series.arm.draft_length,
        "auto": series.arm.auto,
        "text": text_of(series, case.temperature),
        "wrong_from": series.wrong_from,
        "near_ties": [asdict(tie) for tie in series.near_ties],
        "tokens_per_second": _spread(
            Spread.of(series.speeds) if series.speeds else None
        ),
        "repeats": [round(speed, 3) for speed in series.speeds],
        "timed_tokens": series.tokens,
        "first_token_seconds": _spread(
            Spread.of([run.first_seconds for run in series.runs])
            if series.runs
            else None
        ),
        "speedup": _spread(series.over(case.plain)),
        "rounds": counts.rounds,
        "drafts": counts.drafts,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance_rate": round(counts.acceptance_rate, 4),
        "mean_accepted_length": round(counts.mean_accepted_length, 4),
        "tokens_per_round": round(counts.tokens_per_round, 4),
        "accepted_per_position": [
            round(rate, 4) for rate in counts.accepted_per_position
        ],
    }


def _spread(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {name: round(value, 4) for name, value in asdict(spread).items()}
