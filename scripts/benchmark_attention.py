"""Measures fused attention by rows, where the keys grow and where they do not.

On CUDA mlx takes attention of two and more rows from cuDNN, which makes a plan for
each pair of row count and key count that it has not met. A verify meets a new key
count in every round. Arms: "new" has another key count in each call, "same" does not,
"padded" has the keys of "new" in a buffer of whole steps, and a mask for what is not
filled.

With --prompts a prompt is read at once, of so many tokens and one more in each call;
"sized" is what a draft model does (models/cuda/padded_attention.py), the median of all
calls but the first, and "first" is that. --behind says how many tokens come before it.

    python scripts/benchmark_attention.py --keys 100 --keys 8192
    python scripts/benchmark_attention.py --prompts 310 --prompts 1500 --behind 100
    MLX_CUDA_USE_CUDNN_SDPA=0 python scripts/benchmark_attention.py
"""

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import typer

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmark(
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 1 to 17.")
    ] = None,
    keys: Annotated[
        list[int] | None, typer.Option(min=1, help="By default 100 and 8,192.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    dim: Annotated[int, typer.Option(min=8)] = 128,
    prompts: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens; nothing else is measured.")
    ] = None,
    behind: Annotated[int, typer.Option(min=0, help="Tokens before a prompt.")] = 0,
    step: Annotated[int, typer.Option(min=1, help="Rows a buffer grows by.")] = 256,
    calls: Annotated[int, typer.Option(min=1)] = 12,
) -> None:
    """Print milliseconds of one attention, medians over the calls."""
    use_blas("auto")
    if prompts is not None:
        shape = (heads, kv_heads, dim)
        print(json.dumps([_of_prompt(shape, n, behind, calls) for n in prompts]))
        return
    found = []
    for first in keys or [100, 8192]:
        for width in rows or [1, 2, 3, 4, 5, 6, 8, 9, 16, 17]:
            arms = _arms((heads, kv_heads, dim), width, step)
            times = {name: _median(arm, first, calls) for name, arm in arms.items()}
            found.append({"keys": first, "rows": width, **times})
            shown = "  ".join(f"{name} {ms:7.3f}" for name, ms in times.items())
            typer.echo(f"keys {first:6}  rows {width:3}  {shown}", err=True)
    print(json.dumps({"heads": [heads, kv_heads, dim], "step": step, "ms": found}))


def _arms(
    shape: tuple[int, int, int], width: int, step: int
) -> dict[str, Callable[[int, int], Any]]:
    """Return the arms; each takes the first key count and the number of its call."""
    import mlx.core as mx
    from mlx_lm.models.base import create_causal_mask

    heads, kv_heads, dim = shape
    queries = mx.random.normal((1, heads, width, dim)).astype(mx.bfloat16)
    buffer = mx.random.normal((1, kv_heads, 16384, dim)).astype(mx.bfloat16)
    mx.eval(queries, buffer)

    def attend(count: int, mask: Any) -> Any:
        held = buffer[..., :count, :]
        return mx.fast.scaled_dot_product_attention(
            queries, held, held, scale=dim**-0.5, mask=mask
        )

    causal = "causal" if width > 1 else None

    def padded(first: int, call: int) -> Any:
        count = first + call
        room = -(-count // step) * step
        seen = create_causal_mask(width, count - width)
        return attend(room, mx.pad(seen, [(0, 0), (0, room - count)]))

    return {
        "new": lambda first, call: attend(first + call, causal),
        "same": lambda first, _: attend(first, causal),
        "padded": padded,
    }


def _of_prompt(
    shape: tuple[int, int, int], first: int, behind: int, calls: int
) -> dict[str, float]:
    """Return the milliseconds of attention over a prompt in two ways."""
    import mlx.core as mx

    from mlx_speculation.models.cuda import padded_attention
    from mlx_speculation.models.round_context import rows_of_a_round

    heads, kv_heads, dim = shape
    most = first + calls
    held = mx.random.normal((1, heads, most, dim)).astype(mx.bfloat16)
    keys = mx.random.normal((1, kv_heads, behind + most, dim)).astype(mx.bfloat16)
    mx.eval(held, keys)

    def native(_: int, call: int) -> Any:
        count = first + call
        seen = keys[..., : behind + count, :]
        return mx.fast.scaled_dot_product_attention(
            held[..., :count, :], seen, seen, scale=dim**-0.5, mask="causal"
        )

    def sized(_: int, call: int) -> Any:
        count = first + call
        seen = keys[..., : behind + count, :]
        with rows_of_a_round(count):
            return padded_attention.attention(
                held[..., :count, :], seen, seen, dim**-0.5, "causal"
            )

    found = {"tokens": float(first), "behind": float(behind)}
    for name, arm in (("new", native), ("sized", sized)):
        started = time.perf_counter()
        mx.eval(arm(first, 0))
        found[f"{name}, first"] = round((time.perf_counter() - started) * 1e3, 3)
        found[name] = _median(arm, first, calls)
    typer.echo(
        "  ".join(f"{name} {value:g}" for name, value in found.items()), err=True
    )
    return found


def _median(arm: Callable[[int, int], Any], first: int, calls: int) -> float:
    """Return the median milliseconds of a call, the first one apart."""
    import mlx.core as mx

    mx.eval(arm(first, 0))
    times = []
    for call in range(1, calls + 1):
        started = time.perf_counter()
        mx.eval(arm(first, call))
        times.append((time.perf_counter() - started) * 1e3)
    return round(median(times), 3)


if __name__ == "__main__":
    run(app)
