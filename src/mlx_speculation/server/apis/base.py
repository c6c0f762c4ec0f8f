"""Faces: each formats requests, answers and events of one API."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mlx_speculation.engine.stats import Statistics
from mlx_speculation.server.answer_parts import Part, Text, ToolCall
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Token
from mlx_speculation.server.request.models import Object
from mlx_speculation.server.request.options import TextOptions

if TYPE_CHECKING:
    from mlx_speculation.engine import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of one text, and its cost."""

    result: "Result"
    prompt_tokens: int  # 0 if an earlier text has counted the prompt
    cached_tokens: int = 0  # of the prompt
    tokens: int = 0  # generated ones
    reasoning_tokens: int = 0
    called: bool = False  # whether the text calls a tool
    cut: bool = False  # whether a limit of length has ended the text
    out_of_room: bool = False  # whether the context had no room for `max_tokens`
    stop_text: str | None = None  # the stop text that has ended the text


def speculative(endings: Sequence[Ending], draft: str | None) -> Object:
    """Return drafting statistics of texts; a draft "auto" is shown as its sources."""
    every = [each.result.stats for each in endings]
    reached = zip_longest(*(each.reached for each in every), fillvalue=0)
    names = ("rounds", "drafts", "drafted", "accepted")
    sums: Any = {name: sum(getattr(one, name) for one in every) for name in names}
    stats = Statistics(**sums, reached=[*map(sum, reached)])
    if draft == "auto":
        sources = dict.fromkeys(name for each in every for name in each.sources)
        draft = ", ".join(sources) or None
    return {
        "draft": draft,
        "seed": endings[0].result.seed,
        **sums,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "accepted_per_position": list(stats.accepted_per_position),
        "drafter_faults": sum(len(each.drafter_faults) for each in every),
    }


class Face:
    """The format of one API, for the answer to one body.

    Its methods make events for `taken`; `answer` is the whole answer.
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
        raise NotImplementedError

    def end_text(self, choice: int, ending: Ending) -> None:
        """End one text."""
        raise NotImplementedError

    def close(self) -> None:
        """End an answer whose texts have ended."""

    def keep_alive(self) -> None:
        """Keep the connection open after seconds of silence."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> None:
        """End a stream with an error."""
        raise NotImplementedError

    def _send(self, data: Object, name: str | None = None) -> None:
        """Make a server-sent event."""
        line = "" if name is None else f"event: {name}\n"
        self._unsent.append(f"{line}data: {json.dumps(data)}\n\n".encode())


class BlockFace(Face):
    """Answers as lists of blocks, of which one is open at a time.

    White space alone makes no text block, and a text block after another block begins
    without line feeds.
    """

    def __init__(self, body: TextOptions, settings: Settings) -> None:
        super().__init__(body, settings)
        self._blocks: list[Object] = []  # the complete blocks
        self._open: Part | None = None  # the first part of the open block
        self._text = ""  # of the open block
        self._spaces = ""  # white space before a text block

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
        """Return the text that a call's block shows."""
        return call.arguments

    def _begin(self, part: Part) -> None:
        """Open a block."""
        raise NotImplementedError

    def _delta(self, part: Part, text: str) -> None:
        """Send a piece of the open block."""
        raise NotImplementedError

    def _ended(self, part: Part, status: str) -> None:
        """End the open block, and add it to `_blocks`."""
        raise NotImplementedError
