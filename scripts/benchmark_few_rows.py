"""Measures what few rows take on an NVIDIA GPU: attention, and forwards of a batch.

Attention of one layer is timed on the device, by torch's profiler: the kernel of
`models/cuda/attention.py` beside mlx's. Forwards of the grown dense target (growing.py)
are timed by the host, with the kernels for few rows and without: building the graph,
handing it over, waiting for it; and plain steps that follow each other without a break.

    python scripts/benchmark_few_rows.py
    python scripts/benchmark_few_rows.py --forwards
"""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import mlx.core as mx
import typer
from growing import SHAPES, grow
from torch.profiler import ProfilerActivity, profile

from mlx_speculation import SpeculativeGenerator, load
from mlx_speculation.cli import run
from mlx_speculation.demo import demo_models, demo_prompts
from mlx_speculation.models import BatchLane, Lane
from mlx_speculation.models.cuda.attention import attention
from mlx_speculation.models.lanes import batch_lane
from mlx_speculation.models.round_context import rows_of_a_round

HEADS = [(64, 16, 64), (32, 8, 128), (16, 2, 256)]  # queries, keys, dimension
CASES = [(1, 5, 512), (1, 5, 2048), (1, 5, 8192), (16, 1, 512), (16, 5, 512)]
CASES += [(32, 5, 512), (16, 5, 2048)]  # sequences, rows, keys
FORWARDS = [(1, 5), (1, 9), (16, 1), (16, 5), (32, 1), (32, 5)]  # sequences, rows
REPEATS = 10
CONTEXT = 300

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def few_rows(
    forwards: Annotated[bool, typer.Option(help="Of the 8 B shape instead.")] = False,
) -> None:
    """Print a line for each case, then one JSON object."""
    found = forwards_taken() if forwards else attention_taken()
    print(json.dumps(found))


def attention_taken() -> list[dict[str, Any]]:
    """Return microseconds of the device for each case of attention."""
    found = []
    for heads, key_heads, dim in HEADS:
        for batch, rows, columns in CASES:
            queries = mx.random.normal((batch, heads, rows, dim)).astype(mx.bfloat16)
            held = mx.random.normal((2, batch, key_heads, columns + 64, dim))
            keys, values = held.astype(mx.bfloat16)[:, :, :, :columns]
            ends = mx.arange(columns - rows - 20, columns - 20)[:, None]
            mask = mx.broadcast_to(
                mx.arange(columns) <= ends, (batch, 1, rows, columns)
            )
            mx.eval(queries, keys, values, mask)

            def ours(
                q: mx.array = queries,
                k: mx.array = keys,
                v: mx.array = values,
                m: mx.array = mask,
            ) -> mx.array:
                return attention(q, k, v, 0.1, m)

            def theirs(
                q: mx.array = queries,
                k: mx.array = keys,
                v: mx.array = values,
                m: mx.array = mask,
            ) -> mx.array:
                return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=m)

            taken = {"kernel_us": on_device(ours), "mlx_us": on_device(theirs)}
            case = f"{heads}/{key_heads} x {dim}, {batch} x {rows} x {columns}"
            print(case, taken)
            found.append({"case": case, **taken})
    return found


def on_device(act: Callable[[], mx.array]) -> float:
    """Return the microseconds that the device is busy with one call."""
    for _ in range(3):
        mx.eval(act())
    mx.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(REPEATS):
            mx.eval(act())
        mx.synchronize()
    total = sum(event.self_device_time_total for event in seen.key_averages())
    return float(total) / REPEATS


def forwards_taken() -> list[dict[str, Any]]:
    """Return milliseconds of forwards, with the kernels and without."""
    small: Any
    small, tokenizer = load(demo_models()["dense"])
    model = grow(small, SHAPES["8B"])
    SpeculativeGenerator(model, tokenizer, draft="lookup")  # its layers get kernels
    text = [t for one in demo_prompts() for t in tokenizer.encode(one.text)]
    found = []
    for rows, width in FORWARDS:
        lanes = []
        for row in range(rows):
            lanes.append(Lane(model))
            lanes[-1].feed(text[5 * row : 5 * row + CONTEXT - 7 * (row % 11)])
        batch = BatchLane(model)
        batch.join(lanes)
        for name, inside in (("kernels", rows_of_a_round), ("mlx", nullcontext)):
            patched: Any = batch_lane
            patched.rows_of_a_round = inside
            case = {
                "rows": rows,
                "width": width,
                "with": name,
                **one_by_one(batch, width),
            }
            if width == 1:
                case["pipelined"] = pipelined(batch)
            print(case)
            found.append(case)
    return found


def forward(batch: BatchLane, tokens: mx.array) -> mx.array:
    """Return the choices of a forward that is kept, not evaluated."""
    width = tokens.shape[1]
    with batch.begin(width, whole=True) as lane_round:
        logits = lane_round.forward(tokens)
        lane_round.commit(width)
    return mx.argmax(logits, axis=-1)


def one_by_one(batch: BatchLane, width: int) -> dict[str, float]:
    """Return the milliseconds of a forward by itself, and of its parts."""
    tokens = mx.full((batch.rows, width), 7, mx.uint32)
    looks = []
    for _ in range(REPEATS + 3):
        mx.synchronize()
        times = [time.perf_counter()]
        chosen = forward(batch, tokens)
        times.append(time.perf_counter())
        mx.async_eval(chosen)
        times.append(time.perf_counter())
        mx.eval(chosen)
        times.append(time.perf_counter())
        looks.append(times)
        for cache in batch.caches:
            cache.trim(width)
    parts = [[1e3 * (b - a) for a, b in pairwise(t)] for t in looks[3:]]
    build, submit, wait = (median(part) for part in zip(*parts, strict=True))
    return {
        "build": build,
        "submit": submit,
        "wait": wait,
        "all": build + submit + wait,
    }


def pipelined(batch: BatchLane) -> float:
    """Return the milliseconds of a plain step among others, the best of three runs."""
    best = float("inf")
    for _ in range(3):
        chosen, before = mx.full((batch.rows, 1), 7, mx.uint32), None
        mx.synchronize()
        started = time.perf_counter()
        for _ in range(REPEATS):
            chosen = forward(batch, chosen)
            mx.async_eval(chosen)
            if before is not None:
                mx.eval(before)
            before = chosen
        mx.eval(chosen)
        best = min(best, (time.perf_counter() - started) / REPEATS)
        for cache in batch.caches:
            cache.trim(REPEATS)
    return 1e3 * best


if __name__ == "__main__":
    run(app)
