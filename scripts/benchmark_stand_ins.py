"""What forwards of a few rows take with mlx's own operations and with what stands in.

On an x86-64 CPU with OpenBLAS in front, rounds call other functions than mlx-lm's
layers name (`models/ops/round_ops.py`). Forwards of a round with and without
them take turns on the same caches, one by one, rolled back after each. The rows are
compared first. Elsewhere nothing stands in, and the script says so.

The last line on standard output is one JSON object.

    python scripts/benchmark_stand_ins.py --context 300 --context 2000
"""

import json
import time
from contextlib import contextmanager
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer
from benchmark_options import TARGETS, Target, folder_of

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mlx.core as mx

    from mlx_speculation.models import Lane

ROWS = [1, 2, 3, 5, 9, 17]
CONTEXTS = [300, 2000]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def stand_ins(
    target: Target = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 300 and 2000.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=4)] = 40,
) -> None:
    """Print milliseconds of a forward by rows, without and with stand-ins."""
    chosen = use_blas("auto")
    from mlx_speculation import load
    from mlx_speculation.models import Lane, ModelHooks
    from mlx_speculation.models.round_context import x86_serves

    if not x86_serves():
        raise typer.BadParameter(f"nothing stands in here; BLAS: {chosen.detail}")
    results = []
    for name in target or TARGETS:
        model = load(folder_of(name))[0]
        recorders = ModelHooks(model)
        for length in context or CONTEXTS:
            lane = Lane(model, sliding="slack")
            lane.feed([index * 37 % 2000 + 3 for index in range(length)])
            for rows in ROWS:
                taken = by_turns(lane, rows, repeats)
                results.append(
                    {"target": name, "context": length, "rows": rows, **taken}
                )
                print(
                    f"{name}, {length} tokens, {rows:2} rows: "
                    f"{shown(taken['mlx'])} -> {shown(taken['stand-ins'])} ms"
                )
        recorders.remove()
    print(json.dumps({"blas": chosen.detail, "results": results}))


def shown(values: list[float]) -> str:
    """Return a median with its quartiles."""
    low, middle, high = values
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def by_turns(lane: "Lane", rows: int, repeats: int) -> dict[str, list[float]]:
    """Return the quartiles of milliseconds of each way.

    Raises:
        AssertionError: the logits differ by more than rounding.
    """
    import mlx.core as mx

    seconds: dict[str, list[float]] = {"mlx": [], "stand-ins": []}
    with mlx_alone():
        wanted = forward(lane, rows)
    assert mx.allclose(forward(lane, rows), wanted, rtol=1e-3, atol=1e-3).item()
    for _ in range(repeats):
        with mlx_alone():
            seconds["mlx"].append(timed(lane, rows))
        seconds["stand-ins"].append(timed(lane, rows))
    return {
        name: [1e3 * value for value in quantiles(taken)]
        for name, taken in seconds.items()
    }


def timed(lane: "Lane", rows: int) -> float:
    """Return the seconds of one forward."""
    started = time.perf_counter()
    forward(lane, rows)
    return time.perf_counter() - started


def forward(lane: "Lane", rows: int) -> "mx.array":
    """Run a round's forward to its end, and roll it back."""
    import mlx.core as mx

    with lane.begin() as lane_round:
        logits = lane_round.forward(mx.arange(5, 5 + rows))
        mx.eval(mx.argmax(logits, axis=-1))
    return logits


@contextmanager
def mlx_alone() -> "Iterator[None]":
    """Let rounds take mlx's own operations inside the block."""
    from mlx_speculation.models import round_context

    here: Any = round_context._device_here
    round_context._device_here = lambda: None
    try:
        yield
    finally:
        round_context._device_here = here


if __name__ == "__main__":
    run(app)
