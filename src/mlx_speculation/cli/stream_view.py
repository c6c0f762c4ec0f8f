"""Display of a running stream, and of its statistics."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape
from rich.table import Table

from mlx_speculation.cli.console import Report, Screen, number, percent
from mlx_speculation.cli.load_pair import as_object

if TYPE_CHECKING:
    from mlx_speculation.engine import Chunk, Result, Stream


@dataclass(slots=True)
class PromptBar:
    """Progress bar of the prefill."""

    total: int  # prompt tokens but the last, which the first round reads
    done: int = 0
    seconds: float = 0.0  # until the first token
    report: Report | None = None

    def advance(self, tokens: int) -> None:
        """Add a number of prompt tokens that were read."""
        self.done += tokens
        if self.report is not None:
            self.report(min(self.done, self.total), self.total)


def show(
    stream: "Stream",
    screen: Screen,
    chunks: list["Chunk"],
    bar: PromptBar,
    *,
    colour: bool = False,
) -> str:
    """Print a stream's text; return its finish reason, or "interrupted" after Ctrl-C.

    Chunks are appended to `chunks`. With `colour` accepted tokens are green.
    """
    with screen.text_line(), stream:
        try:
            for chunk in _with_bar(stream, screen, bar):
                chunks.append(chunk)
                text = chunk.text
                if text and colour and chunk.origin.writer == "accepted":
                    text = typer.style(text, fg="green")
                screen.text(text)
        except KeyboardInterrupt:
            return "interrupted"
    return stream.result.finish_reason


def _with_bar(stream: "Stream", screen: Screen, bar: PromptBar) -> Iterator["Chunk"]:
    started = time.perf_counter()
    with screen.progress("reading the prompt") as report:
        bar.report = report
        first = next(stream, None)
    bar.seconds = time.perf_counter() - started
    if first is not None:
        yield first
        yield from stream


def as_fields(result: "Result", ended: str, prompt_tokens: int) -> dict[str, Any]:
    """Return a text and its statistics for JSON."""
    return {
        "text": result.text,
        "tokens": result.tokens,
        "prompt_tokens": prompt_tokens,
        "finish_reason": ended,
        "statistics": as_object(result.stats),
    }


def lines(result: "Result", ended: str, prompt_tokens: int, bar: PromptBar) -> str:
    """Return the statistics of a generation, in one to three lines."""
    stats = result.stats
    read = prompt_tokens - 1 - stats.reused  # the first round reads the last token
    seconds = stats.prefill_seconds
    rate = f", {read / seconds:.0f}/s" if read > 0 and seconds and bar.seconds else ""
    reused = f", {stats.reused} not read again" if stats.reused else ""
    said = (
        f"{len(result.tokens)} tokens ({ended}), {stats.tokens_per_second:.1f}/s; "
        f"prompt {prompt_tokens} tokens{rate}{reused}; "
    )
    said += f"first token after {bar.seconds:.2f} s" if bar.seconds else "no token"
    if stats.drafted:
        said += (
            f"\n{percent(stats.acceptance_rate)} of {stats.drafted} drafted tokens "
            f"accepted, {stats.tokens_per_round:.2f} tokens per round"
        )
    if stats.paused:
        said += f"\ndrafting paused: {stats.paused}"
    return said


def figures(result: "Result") -> dict[str, str]:
    """Return the main statistics of a generation as texts, by name."""
    stats = result.stats
    counts = {n: str(getattr(stats, n)) for n in ("rounds", "drafted", "accepted")}
    return {
        "tokens": str(len(result.tokens)),
        "tokens per second": number(stats.tokens_per_second),
        "tokens per round": number(stats.tokens_per_round),
        **counts,
        "acceptance rate": percent(stats.acceptance_rate),
        "mean accepted length": number(stats.mean_accepted_length),
    }


def summary(result: "Result", ended: str) -> Table:
    """Return the statistics of a generation as a table."""
    stats = result.stats
    rows = {
        **figures(result),
        "finish reason": ended,
        "drafts": str(stats.drafts),
        "accepted per position": " ".join(map(percent, stats.accepted_per_position)),
    }
    if stats.paused:
        rows["drafting paused"] = escape(stats.paused)
    if stats.reused:
        rows["tokens not read again"] = str(stats.reused)
    for part in ("draft", "verify", "sampler", "host"):
        rows[f"{part} seconds"] = f"{getattr(stats, f'{part}_seconds'):.3f}"
    for key, size in asdict(result.memory).items():
        rows[f"{key.replace('_', ' ')}, MB"] = number(size / 1e6)
    for fault in stats.drafter_faults:
        rows[f"{fault.drafter} disabled"] = escape(fault.reason)
    table = Table("statistic", "value", title="Statistics")
    for row in rows.items():
        table.add_row(*row)
    return table
