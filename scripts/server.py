"""Compares our server with mlx-lm's on the same models, through the openai client.

Four servers run as processes: ours and mlx-lm's, each with the draft model and without.
In a pass all servers answer the same prompts, one server after the other. Each pass has
new prompts and another order of the servers. The clients of a server ask concurrently.
Times are medians and 95th percentiles over all requests; tokens per second are of all
clients together. Texts are compared with those of our server without a draft; in a
batch, greedy texts may differ after a near-tie (docs/exactness.md).

    python scripts/server.py
    python scripts/server.py --clients 1 --clients 8 --requests 32
"""

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import options as opt
from bench.options import folder_of
from bench.prompts import bundled
from bench.report import reported
from bench.turns import in_turns
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from bench.servers import Served, Server

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def server(
    context: typer.Context,
    target: opt.Target = "dense",
    draft_model: opt.DraftModel = "draft",
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Clients; by default 1, 4 and 8.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per pass.")] = 16,
    tokens: opt.Tokens = 64,
    repeats: opt.Repeats = 4,
    temperature: opt.Temperature = 0.0,
    mlx_lm_length: Annotated[
        int, typer.Option(min=1, help="Tokens that mlx-lm's server drafts.")
    ] = 3,
    blas: opt.Blas = "auto",
    json_file: opt.Json = None,
) -> None:
    """Measure latencies of four servers."""
    with reported(context) as report:
        report.say("starting four servers")
        models = folder_of(target), folder_of(draft_model)
        with started(*models, blas, mlx_lm_length) as servers:
            numbers = itertools.count()  # no prompt is sent twice
            for count in clients or [1, 4, 8]:
                report.say(f"{count} clients")
                passes = [
                    prompts_of(next(numbers), requests) for _ in range(repeats + 1)
                ]
                options = {"max_tokens": tokens, "temperature": temperature}
                for row in measured(servers, passes, count, options):
                    report.add(clients=count, **row)


@contextmanager
def started(
    target: Path, draft: Path, blas: str, length: int
) -> "Iterator[list[Server]]":
    """Start the four servers."""
    from bench.servers import mlx_lm_server, our_server, widened

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = widened(target, folder / "target")
        small = str(widened(draft, folder / "draft"))
        theirs = ("--draft-model", small, "--num-draft-tokens", str(length))
        yield [
            stack.enter_context(each)
            for each in (
                our_server("ours, no draft", model, blas),
                our_server("ours, draft model", model, blas, "--draft", small),
                mlx_lm_server("mlx-lm, no draft", model, blas),
                mlx_lm_server("mlx-lm, draft model", model, blas, *theirs),
            )
        ]


def prompts_of(number: int, count: int) -> list[str]:
    """Return the prompts of a pass; each begins with a number of its own."""
    groups = bundled(None, 8).values()
    texts = [question.turns[0] for group in groups for question in group]
    return [
        f"# {number:03d}.{index:03d}\n{texts[(number * count + index) % len(texts)]}"
        for index in range(count)
    ]


def measured(
    servers: "list[Server]",
    passes: list[list[str]],
    clients: int,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """Let the servers answer all passes, the first as warm-up; return table rows."""
    first, *others = passes

    def serve(server: "Server", number: int) -> "tuple[list[Served], float]":
        return server.serve(others[number], clients, **options)

    acts = {each.name: partial(serve, each) for each in servers}
    for each in servers:
        each.serve(first, clients, **options)
    runs = in_turns(acts, len(others), warm_up=0)
    reference = runs[servers[0].name]
    return [row_of(name, each_run, reference) for name, each_run in runs.items()]


def row_of(
    name: str,
    turns: "list[tuple[list[Served], float]]",
    reference: "list[tuple[list[Served], float]]",
) -> dict[str, Any]:
    """Return the table row of one server from the answers and seconds of each pass."""
    import numpy as np

    served = [one for texts, _ in turns for one in texts]
    others = [one for texts, _ in reference for one in texts]
    row: dict[str, Any] = {"server": name}
    for part in ("first", "whole"):
        times = [1e3 * getattr(one, part) for one in served]
        median, most = (float(value) for value in np.percentile(times, [50, 95]))
        row |= {f"{part}_ms": median, f"{part}_p95": most}
    tokens = sum(one.tokens for one in served)
    equal = sum(a.text == b.text for a, b in zip(served, others, strict=True))
    return {
        **row,
        "tokens_per_second": tokens / sum(seconds for _, seconds in turns),
        "tokens": tokens,
        "equal": f"{equal} of {len(served)}",
    }


if __name__ == "__main__":
    run(app)
