"""Faces: each reads requests of one API, and formats its answers and events."""

import json
from collections.abc import Iterable, Sequence

from mlx_speculation.engine import Result
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.server.answer_parts import Part, Text, ToolCall
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job, Token
from mlx_speculation.server.request.models import Object
from mlx_speculation.server.request.options import TextOptions


def summed(results: Iterable[Result]) -> Statistics:
    """Return the statistics of several texts together."""
    stats = Statistics()
    for each in results:
        stats.add(each.stats)
    return stats


def speculative(results: Sequence[Result], draft: str | None) -> Object:
    """Return drafting statistics of texts; for "auto", name the kinds that drafted."""
    stats = summed(results)
    if draft == "auto":
        draft = ", ".join(stats.sources) or None
    names = ("rounds", "drafts", "drafted", "accepted", "acceptance_rate")
    return {
        "draft": draft,
        "seed": results[0].seed,
        **{name: getattr(stats, name) for name in (*names, "mean_accepted_length")},
        "accepted_per_position": list(stats.accepted_per_position),
        "drafter_faults": len(stats.drafter_faults),
    }


class Face:
    """The format of one API, for the answer to one body.

    Its methods make events, and `taken` returns them. `answer` is the whole answer.
    """

    answer: Object  # set by the last event

    def __init__(self, body: TextOptions, settings: Settings) -> None:
        self.request = body.request(settings)
        self._draft = self.request.draft or settings.draft
        self._unsent: list[bytes] = []

    def taken(self) -> bytes:
        """Return the events that were made since the last call."""
        events, self._unsent = self._unsent, []
        return b"".join(events)

    def open(self, choice: int, prompt_tokens: int) -> None:
        """Begin one text: the request is valid, and waits for its turn."""

    def reading(self, tokens: int, of: int) -> None:
        """Report the progress of the prefill."""

    def parts(self, choice: int, parts: list[Part], tokens: Sequence[Token]) -> None:
        """Send new parts of a text, and tokens if their probabilities are wanted."""

    def end_text(self, choice: int, job: Job) -> None:
        """End one text, whose result the job has."""

    def close(self) -> None:
        """End an answer whose texts have ended."""

    def keep_alive(self) -> None:
        """Keep the connection open after seconds of silence."""

    def failed(self, error: ApiError) -> None:
        """End a stream with an error."""

    def _send(self, data: Object, name: str | None = None) -> None:
        line = "" if name is None else f"event: {name}\n"
        self._unsent.append(f"{line}data: {json.dumps(data)}\n\n".encode())


class BlockFace(Face):
    """The format of an API whose answers are lists of blocks; one is open at a time.

    White space alone makes no text block, and a text block after another block begins
    without line feeds.
    """

    def __init__(self, body: TextOptions, settings: Settings) -> None:
        super().__init__(body, settings)
        self._blocks: list[Object] = []  # the complete blocks
        self._open: Part | None = None  # the first part of the open block
        self._text = ""  # of the open block
        self._spaces = ""  # white space that begins a text block, if text follows

    def parts(self, choice: int, parts: list[Part], tokens: Sequence[Token]) -> None:
        """Send new parts of the text."""
        for part in parts:
            call = isinstance(part, ToolCall)
            text = self._arguments(part) if isinstance(part, ToolCall) else part.text
            if call or type(self._open) is not type(part):
                if isinstance(part, Text):
                    text = self._spaces + text
                    self._spaces = "" if text.strip() else text
                    if self._spaces:
                        continue
                    text = text.lstrip("\n") if self._open or self._blocks else text
                self._closed()
                self._open, self._text = part, ""
                self._begin(part)
            self._text += text
            self._delta(part, text)
            if call:
                self._closed()

    def _closed(self, status: str = "completed") -> None:
        """Complete the open block, if there is one, and clear `_spaces`."""
        self._spaces = ""
        if self._open is not None:
            self._ended(self._open, status)
            self._open = None

    def _arguments(self, call: ToolCall) -> str:
        return call.arguments

    def _begin(self, part: Part) -> None:
        """Open a block."""

    def _delta(self, part: Part, text: str) -> None:
        """Send a piece of the open block."""

    def _ended(self, part: Part, status: str) -> None:
        """End the open block, and add it to `_blocks`."""
