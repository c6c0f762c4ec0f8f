"""Display of a running stream, and of its statistics."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from mlx_speculation.cli.console import Report, Screen, number, percent

if TYPE_CHECKING:
    from mlx_speculation.engine import Chunk, Result, Stream


class PromptBar:
    """Progress bar of the prefill.

    Args:
        total: the number of prompt tokens without the last; the first round reads that.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self.seconds = 0.0  # until the first token
        self._report: Report | None = None

    def advance(self, tokens: int) -> None:
        """Add a number of prompt tokens that were read."""
        self._done += tokens
        if self._report is not None:
            self._report(min(self._done, self._total), self._total)

    def show(self, report: Report) -> None:
        """Show further progress with `report`."""
        self._report = report


def show(
    stream: "Stream",
    screen: Screen,
    chunks: list["Chunk"],
    bar: PromptBar,
    *,
    colour: bool = False,
) -> bool:
    """Print a stream's text; return whether Ctrl-C has ended the stream.

    All chunks are appended to `chunks`. With `colour` accepted tokens are green.
    """
    with screen.text_line(), stream:
        try:
            for chunk in _with_bar(stream, screen, bar):
                chunks.append(chunk)
                green = colour and chunk.origin.writer == "accepted"
                text = chunk.text
                shown = typer.style(text, fg="green") if green and text else text
                screen.text(shown)
        except KeyboardInterrupt:
            return True
    return False


def _with_bar(stream: "Stream", screen: Screen, bar: PromptBar) -> Iterator["Chunk"]:
    """Yield a stream's chunks; show a progress bar until the first one."""
    started = time.perf_counter()
    with screen.progress("reading the prompt") as report:
        bar.show(report)
        first = next(stream, None)
    bar.seconds = time.perf_counter() - started
    if first is not None:
        yield first
        yield from stream


def lines(result: "Result", ended: str, prompt_tokens: int, bar: PromptBar) -> str:
    """Return the statistics of a generation, in one to three lines."""
    stats = result.stats
    read = prompt_tokens - 1 - stats.reused  # the first round reads the last token
    seconds = stats.prefill_seconds
    rate = f", {read / seconds:.0f}/s" if read > 0 and seconds else ""
    reused = f", {stats.reused} not read again" if stats.reused else ""
    said = (
        f"{len(result.tokens)} tokens ({ended}), {stats.tokens_per_second:.1f}/s; "
        f"prompt {prompt_tokens} tokens{rate}{reused}; first token after "
        f"{bar.seconds:.2f} s"
    )
    if stats.drafted:
        said += (
            f"\n{percent(stats.acceptance_rate)} of {stats.drafted} drafted tokens "
            f"accepted, {stats.tokens_per_round:.2f} tokens per round"
        )
    if stats.paused:
        said += f"\ndrafting paused: {stats.paused}"
    return said


def summary(result: "Result", ended: str) -> Table:
    """Return the statistics of a generation as a table."""
    stats = result.stats
    table = Table("statistic", "value", title="Statistics")
    table.add_row("tokens", str(len(result.tokens)))
    table.add_row("finish reason", ended)
    table.add_row("tokens per second", number(stats.tokens_per_second))
    for name in ("rounds", "drafts", "drafted", "accepted"):
        table.add_row(name, str(getattr(stats, name)))
    table.add_row("acceptance rate", percent(stats.acceptance_rate))
    table.add_row("mean accepted length", number(stats.mean_accepted_length))
    table.add_row(
        "accepted per position", " ".join(map(percent, stats.accepted_per_position))
    )
    if stats.paused:
        table.add_row("drafting paused", escape(stats.paused))
    if stats.reused:
        table.add_row("tokens not read again", str(stats.reused))
    for part in ("draft", "verify", "sampler", "host"):
        seconds = getattr(stats, f"{part}_seconds")
        table.add_row(f"{part} seconds", f"{seconds:.3f}")
    for key, size in asdict(result.memory).items():
        table.add_row(f"{key.replace('_', ' ')}, MB", number(size / 1e6))
    for fault in stats.drafter_faults:
        table.add_row(f"{fault.drafter} disabled", escape(fault.reason))
    return table
