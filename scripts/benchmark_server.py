"""Measures our server beside mlx-lm's, on the same models, with the openai client.

Four servers run at once as processes of their own, ours and mlx-lm's, with the draft
model and without. One is asked at a time: in every pass each serves the same new
prompts to clients that ask side by side, and the next pass begins with the next server.
Prompts differ from pass to pass, so that no server has read one before.

For each number of clients it prints, over all requests, the median and the 95th
percentile of the time to the first piece of text and to the end, in milliseconds, and
tokens per second of all clients together. Greedy texts of all servers are compared with
those of ours without a draft: in a batch they may part where two tokens are almost
equal.

The last line on standard output is one JSON object.

    python scripts/benchmark_server.py
    python scripts/benchmark_server.py --clients 1 --clients 8 --passes 5
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from benchmark_options import GROUPS, Blas, DraftModel, folder_of, progress, texts_of

from mlx_speculation.blas import use_blas
from mlx_speculation.cli import run

if TYPE_CHECKING:
    from server_arms import Arm, Request, Served

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(slots=True)
class Series:
    """What one server has served to so many clients.

    Attributes:
        name: of the server.
        clients: that asked side by side.
        served: every text of every pass.
        seconds: of each pass.
        equal: greedy texts that are those of our plain decoding.
    """

    name: str
    clients: int
    served: "list[Served]" = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    equal: int = 0

    @property
    def row(self) -> dict[str, Any]:
        """The figures."""
        tokens = sum(one.tokens for one in self.served)
        return {
            "server": self.name,
            "clients": self.clients,
            "first_ms": _percentiles([one.first for one in self.served]),
            "whole_ms": _percentiles([one.whole for one in self.served]),
            "tokens_per_second": tokens / sum(self.seconds),
            "requests": len(self.served),
            "tokens": tokens,
            "equal_texts": self.equal,
        }


@app.command()
def benchmark(
    target: Annotated[str, typer.Option(help="dense, sliding, or a folder.")] = "dense",
    draft: DraftModel = None,
    clients: Annotated[list[int] | None, typer.Option(min=1)] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each pass.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Of each text.")] = 64,
    passes: Annotated[int, typer.Option(min=1)] = 4,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    mlx_lm_length: Annotated[
        int, typer.Option(min=1, help="Tokens that mlx-lm's server drafts.")
    ] = 3,
    blas: Blas = "auto",
) -> None:
    """Measure latencies of four servers."""
    chosen = use_blas(blas)
    progress(f"BLAS: {chosen.detail}")
    from mlx_speculation.environment import machine, versions

    rows: list[dict[str, Any]] = []
    with _servers(target, draft or "draft", blas, mlx_lm_length) as arms:
        for count in clients or [1, 4, 8]:
            ours = [Series(arm.name, count) for arm in arms]
            for number in range(-1, passes):  # the first warms up
                asked = list(_requests(number, requests, tokens, temperature))
                _pass(arms, ours, asked, count, number)
            rows += [series.row for series in ours]
            _print(rows[-len(ours) :])
    report = {
        "machine": machine(),
        "versions": versions(),
        "blas": asdict(chosen),
        "target": target,
        "draft": draft or "draft",
        "requests": requests,
        "tokens": tokens,
        "passes": passes,
        "temperature": temperature,
        "results": rows,
    }
    print(json.dumps(report))


@contextmanager
def _servers(target: str, draft: str, blas: str, length: int) -> Iterator["list[Arm]"]:
    """Start all four."""
    from server_arms import mlx_lm_server, our_server, widened

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = widened(folder_of(target), folder / "target")
        small = str(widened(folder_of(draft), folder / "draft"))
        progress("starting four servers")
        theirs = ("--draft-model", small, "--num-draft-tokens", str(length))
        yield [
            stack.enter_context(server)
            for server in (
                our_server("ours, no draft", model, blas),
                our_server("ours, draft model", model, blas, "--draft", small),
                mlx_lm_server("mlx-lm, no draft", model, blas),
                mlx_lm_server("mlx-lm, draft model", model, blas, *theirs),
            )
        ]


def _requests(
    number: int, count: int, tokens: int, temperature: float
) -> "Iterator[Request]":
    """Yield the requests of a pass, all of which begin in a way of their own."""
    from server_arms import Request

    prompts = [prompt.text for group in GROUPS for prompt in texts_of(group, 8)]
    for index in range(count):
        begin = f"# {number + 1:03d}.{index:03d}\n"
        text = begin + prompts[(number * count + index) % len(prompts)]
        yield Request(text, tokens, temperature)


def _pass(
    arms: "list[Arm]",
    series: list[Series],
    asked: "list[Request]",
    clients: int,
    number: int,
) -> None:
    """Let every server serve the same requests, beginning with the next one."""
    found: dict[int, list[Served]] = {}
    for turn in range(len(arms)):
        which = (number + 1 + turn) % len(arms)
        progress(f"{clients} clients, pass {number + 1}: {arms[which].name}")
        found[which], seconds = arms[which].serve(asked, clients)
        if number >= 0:
            series[which].served += found[which]
            series[which].seconds.append(seconds)
    if number >= 0:
        for which, served in found.items():
            pairs = zip(served, found[0], strict=True)
            series[which].equal += sum(one.text == other.text for one, other in pairs)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 95th percentile in milliseconds."""
    import numpy as np

    low, high = np.percentile(seconds, [50, 95])
    return {"p50": float(low) * 1e3, "p95": float(high) * 1e3}


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{rows[0]['clients']} clients", title_justify="left")
    table.add_column("server", no_wrap=True)
    for name in ("first p50", "p95", "whole p50", "p95", "tokens/s", "equal"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        first, whole = row["first_ms"], row["whole_ms"]
        times = (first["p50"], first["p95"], whole["p50"], whole["p95"])
        table.add_row(
            row["server"],
            *(f"{time:.0f}" for time in times),
            f"{row['tokens_per_second']:.1f}",
            f"{row['equal_texts']} of {row['requests']}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    run(app)
