"""`calibrate`: measures the costs of rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mlx_speculation.cli.console import Screen
from mlx_speculation.cli.load_pair import begin, open_pair
from mlx_speculation.cli.options import DRAFT, Json, ModelOptions, PairOptions
from mlx_speculation.option_fields import option

if TYPE_CHECKING:
    from mlx_speculation import SpeculativeGenerator
    from mlx_speculation.engine.draft_length.costs import CostTable, PartsTable


def calibrate(
    target: ModelOptions,
    draft: str = option(
        MISSING,
        "Draft to measure, as in `generate`.",
        "--draft",
        "--draft-model",
        panel=DRAFT,
    ),
    context: list[int] | None = option(
        None,
        "Context length in tokens. Repeatable. Default: 64.",
        min=1,
        max=1 << 22,
    ),
    batch: list[int] | None = option(
        None,
        "Also measure batches of this many requests. Repeatable.",
        min=1,
        max=1 << 10,
    ),
    json: Json = False,
) -> None:
    """Measure the costs of rounds by draft length; keep them for later runs."""
    screen = Screen(json=json)
    here = begin(target.blas, screen)
    generator = open_pair(PairOptions(**asdict(target), draft=draft), screen)
    costs, batches = _measured(generator, context or [64], batch or [], screen)
    title = "Milliseconds of a round by draft length"
    screen.table(_table(title, costs, generator.round_parts))
    part = generator.lengths.part
    how = f"{part} at a time" if part else "all at once"
    screen.say(f"The layers of a round are submitted {how}.")
    for rows, table in batches.items():
        screen.table(_table(f"Milliseconds of a round of {rows} requests", table, {}))
    screen.object(
        command="calibrate",
        model=target.model,
        draft=draft,
        seconds_by_context=_by_context(costs),
        seconds_by_rows={rows: _by_context(one) for rows, one in batches.items()},
        parts_by_context=_by_context(generator.round_parts),
        layers_of_a_part=generator.lengths.part,
        notices=generator.notices,
        **here,
    )


def _measured(
    generator: "SpeculativeGenerator",
    contexts: Sequence[int],
    batch: Sequence[int],
    screen: Screen,
) -> tuple["CostTable", dict[int, "CostTable"]]:
    """Return the costs of rounds of one request, and of batches by row count."""
    try:
        with screen.progress("measuring lengths") as report:
            costs = generator.calibrate(contexts=contexts, progress=report)
        if not batch:
            return costs, {}
        with screen.progress("measuring batches") as report:
            return costs, generator.calibrate_batches(
                batch, contexts=contexts, progress=report
            )
    except KeyboardInterrupt:
        screen.say("Unfinished measurements are not kept.")
        raise


def _by_context(costs: Mapping[int, Any]) -> dict[int, Any]:
    """Return a table keyed by context length instead of by bucket."""
    return {512 * 2**bucket: table for bucket, table in costs.items()}


def _table(title: str, costs: "CostTable", parts: "PartsTable") -> Table:
    lengths = sorted({length for table in costs.values() for length in table})
    table = Table(title=title)
    table.add_column("context up to", no_wrap=True)
    for length in lengths:
        table.add_column("plain" if length == 0 else str(length), justify="right")
    for bucket, seconds in costs.items():
        cells = [f"{seconds[n] * 1e3:.1f}" if n in seconds else "-" for n in lengths]
        table.add_row(f"{512 * 2**bucket}", *cells)
        shares = parts.get(bucket, {})
        for part in ("draft", "verify", "sampler", "host") if shares else ():
            shown = [
                f"{getattr(shares[n], part) * 1e3:.1f}" if n in shares else "-"
                for n in lengths
            ]
            table.add_row(f"  {part}", *shown, style="dim")
    return table
