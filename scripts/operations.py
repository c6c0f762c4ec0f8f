"""What single operations take, by turns of the ways to compute them.

    attention   fused attention by rows: where each call has another key count, where
                none does, and in a buffer of whole steps. On CUDA mlx takes attention
                of two and more rows from cuDNN, which makes a plan for each new pair of
                row and key counts, and a verify meets a new one in every round
    few-rows    attention of a few rows on CUDA: mlx's, and models/cuda/attention.py
    absorbed    a verify of latent attention (the shape of DeepSeek-V3, random weights):
                in mlx-lm's way, and asked as single rows are
    stand-ins   a forward of a bundled target on an x86-64 CPU with OpenBLAS in front:
                mlx's operations, and what stands in for them (models/ops/round_ops.py)
    sampler     the verdict on five rows by options, beside a round of the dense target
    sliding     the writes of so many rounds that the slack of a sliding window is full
                once, and half of the rows kept, beside a KVCache
    lookup      an index of a text, on the host: what a token and a proposal take

`x first` is over the first way, in the same turn. What forwards and attention compute
is compared between their ways first. Operations of another device are left out.

    python scripts/operations.py
    python scripts/operations.py --only attention --size 100 --size 8192 --rows 5
"""

from typing import Annotated

import typer

from bench.options import Blas, Json, Repeats
from bench.report import reported
from bench.turns import Spread, seconds_in_turns
from mlx_speculation.cli import run

NAMES = [
    *("attention", "few-rows", "absorbed", "stand-ins"),
    *("sampler", "sliding", "lookup"),
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def operations(
    context: typer.Context,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(NAMES)}; by default all.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 1, 2, 5 and 9.")
    ] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(
            min=8,
            help="Keys, tokens, a window, a vocabulary; by default 512 and 4,096.",
        ),
    ] = None,
    repeats: Repeats = 20,
    blas: Blas = "auto",
    json_file: Json = None,
) -> None:
    """Time operations by turns, after comparing what they compute."""
    if unknown := set(only or ()) - set(NAMES):
        raise typer.BadParameter(
            f"the operations are {', '.join(NAMES)}; there is no {min(unknown)!r}"
        )
    with reported(context) as report:
        from bench.device_operations import DEVICE
        from bench.host_operations import HOST

        for name, cases in (DEVICE | HOST).items():
            if name not in (only or NAMES):
                continue
            report.say(name)
            for case, acts in cases(rows or [1, 2, 5, 9], size or [512, 4096]):
                taken = seconds_in_turns(acts, repeats, warm_up=2)
                first, *_ = taken.values()
                for way, seconds in taken.items():
                    report.add(
                        operation=name,
                        case=case,
                        way=way,
                        microseconds=Spread.of([1e6 * each for each in seconds]),
                        x_first=Spread.over(seconds, first),
                    )


if __name__ == "__main__":
    run(app)
