"""Measures what a round costs a sliding window, for each way to hold the window.

A round writes some rows, attends over the window and the rows, and keeps half of
them. Its time is taken for the write alone and with the attention, each evaluated at
once. The arms take turns in slices of a few rounds in one process, in changing order:

    plain           a `KVCache` with room for as many rows: what appending costs. For
                    the write alone it grows and starts again; with the attention it
                    always has the same length
    sliding         our `SlidingKVCache`
    moving          the same in a round that finds its buffer full
    native          mlx-lm's `RotatingKVCache`, undone by slicing or by saved rows
    concatenating   window and rows put into new arrays every time

A figure is the median of a slice over that of `plain` in the same slice, as a median
over the slices with its quartiles. `amortized` charges each round of `sliding` with
its share of one `moving` round: one in slack / kept rows finds the buffer full.

Why like this: the masks and the attended rows are the same for all arms (the mask is
made once for all layers of a model), so what differs is how the cache holds its rows.
No figure is taken unless the attention outputs of all arms agree.

The last line on standard output is one JSON object with everything.

    python scripts/benchmark_sliding.py
    python scripts/benchmark_sliding.py --window 4096 --width 4 --slices 100
"""

import json
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_speculation.blas import BlasName, use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from sliding_arms import Arm, Rows, Shape, Use

WINDOWS = [512, 4096]
WIDTHS = list(range(1, 9))
TOLERANCE = 1e-5

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A time over that of the plain arm: median and quartiles over the slices."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, ratios: list[float]) -> "Ratio":
        """Take the quartiles."""
        lower, middle, upper = quantiles(ratios, n=4, method="inclusive")
        return cls(round(middle, 4), round(lower, 4), round(upper, 4))


@dataclass(frozen=True, slots=True)
class Case:
    """What was measured for one window, width and measure.

    Attributes:
        window: the sliding window.
        width: rows of a round.
        slack: of the sliding cache.
        measure: "write" or "round", the latter with the attention.
        plain_microseconds: median of the plain arm.
        over_plain: of each arm, and "amortized".
    """

    window: int
    width: int
    slack: int
    measure: str
    plain_microseconds: float
    over_plain: dict[str, Ratio]


@app.command()
def benchmark(
    window: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 512 and 4096.")
    ] = None,
    width: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows; by default 1 to 8.")
    ] = None,
    slack: Annotated[
        int | None, typer.Option(min=1, help="By default that of the cache.")
    ] = None,
    slices: Annotated[int, typer.Option(min=2, help="Of each arm.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="Of a slice.")] = 5,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    kv_heads: Annotated[int, typer.Option(min=1)] = 4,
    dim: Annotated[int, typer.Option(min=1, help="Of a head.")] = 128,
    blas: Annotated[
        BlasName, typer.Option(help="What multiplies float32 on a Linux CPU.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the JSON object here too.")
    ] = None,
) -> None:
    """Measure the rounds of sliding windows, after checking their attention."""
    chosen = use_blas(blas)
    from sliding_arms import Shape

    from mlx_speculation.caches.types.sliding_kv import default_slack
    from mlx_speculation.environment import machine, versions

    cases: list[Case] = []
    for size, rows in product(window or WINDOWS, width or WIDTHS):
        shape = Shape(size, rows, slack or default_slack(size), heads, kv_heads, dim)
        check(shape)
        for case in measure(shape, slices, rounds):
            show(case)
            cases.append(case)
    report = {
        "machine": machine(),
        "versions": versions(),
        "blas": asdict(chosen),
        "arguments": {
            "slices": slices,
            "rounds": rounds,
            "heads": heads,
            "kv_heads": kv_heads,
            "dim": dim,
        },
        "results": [asdict(case) for case in cases],
        "worst": worst(cases),
    }
    line = json.dumps(report)
    if json_file is not None:
        json_file.write_text(line + "\n", encoding="utf-8")
    print(line)


def check(shape: "Shape") -> None:
    """Require that every arm's attention agrees, before and after it has wrapped.

    Raises:
        AssertionError: an arm differs by more than rounding.
    """
    import mlx.core as mx
    from sliding_arms import make_arms

    arms = make_arms(shape)
    del arms["plain"], arms["moving"]  # of constant length, so not the same text
    for number in range(shape.slack // shape.keep + 3 if shape.slack < 64 else 12):
        rows, queries = shape.rows(shape.width, number), shape.queries(number)
        outputs: dict[str, Any] = {}
        for name, arm in arms.items():
            arm.round(rows, shape.keep, attending(shape, queries, outputs, name))
        for name, output in outputs.items():
            difference = float(mx.abs(output - outputs["concatenating"]).max())
            assert difference <= TOLERANCE, f"{name} differs by {difference}: {shape}"


def attending(
    shape: "Shape", queries: Any, outputs: dict[str, Any], name: str
) -> "Use":
    """Return a use of the shown rows: attend, evaluate, and note the output."""
    import mlx.core as mx

    mask = shape.mask()

    def use(keys: Any, values: Any) -> None:
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=shape.dim**-0.5, mask=mask
        )
        mx.eval(output)
        outputs[name] = output

    return use


def measure(shape: "Shape", slices: int, rounds: int) -> list[Case]:
    """Let the arms take turns; return the cases of both measures."""
    import mlx.core as mx
    from sliding_arms import make_arms

    rows, queries = shape.rows(shape.width, 4), shape.queries(5)
    uses = {"write": mx.eval, "round": attending(shape, queries, {}, "")}
    cases = []
    for measured, use in uses.items():
        arms = make_arms(shape, grows=measured == "write")
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        names = list(arms)
        for number in range(slices + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                times = time_slice(arms[name], rows, shape.keep, use, rounds)
                if number > 0:  # the first warms up
                    seconds[name].append(times)
        cases.append(case_of(shape, measured, seconds))
    return cases


def time_slice(arm: "Arm", rows: "Rows", keep: int, use: "Use", rounds: int) -> float:
    """Return the median seconds of a few rounds, the first of which is not counted."""
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        arm.round(rows, keep, use)
        times.append(time.perf_counter() - started)
        arm.reset()
    return median(times[1:])


def case_of(shape: "Shape", measured: str, seconds: dict[str, list[float]]) -> Case:
    """Turn the times of the slices into ratios."""
    share = shape.keep / shape.slack
    pairs = zip(seconds["sliding"], seconds["moving"], strict=True)
    amortized = [one * (1 - share) + other * share for one, other in pairs]
    over_plain = {
        name: Ratio.of([a / b for a, b in zip(arm, seconds["plain"], strict=True)])
        for name, arm in {**seconds, "amortized": amortized}.items()
    }
    return Case(
        window=shape.window,
        width=shape.width,
        slack=shape.slack,
        measure=measured,
        plain_microseconds=round(median(seconds["plain"]) * 1e6, 1),
        over_plain=over_plain,
    )


def worst(cases: list[Case]) -> dict[str, float]:
    """Return the largest amortized ratio of each measure."""
    return {
        measured: max(
            case.over_plain["amortized"].median
            for case in cases
            if case.measure == measured
        )
        for measured in ("write", "round")
    }


def show(case: Case) -> None:
    """Print one line."""
    ratios = "  ".join(
        f"{name} {ratio.median:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f})"
        for name, ratio in case.over_plain.items()
        if name != "plain"
    )
    print(
        f"window {case.window:5}  width {case.width}  {case.measure}  "
        f"plain {case.plain_microseconds:.0f} us  {ratios}",
        flush=True,
    )


if __name__ == "__main__":
    run(app)
