"""Faces: each formats requests, answers and events of one API."""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mlx_speculation.engine.stats import Statistics
from mlx_speculation.server.answer_parts import Part, Reasoning, Text, ToolCall, joined
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Token
from mlx_speculation.server.request.request import GenerationRequest

if TYPE_CHECKING:
    from mlx_speculation.engine import Result

Block = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of one text, and its cost."""

    result: "Result"
    prompt_tokens: int  # 0 if an earlier text has counted the prompt
    reasoning_tokens: int = 0
    called: bool = False  # whether the text calls a tool
    # The stop text that has ended the text; None: no stop text has.
    stop_text: str | None = None
    # Whether the context had no room for as many tokens as were asked for.
    out_of_room: bool = False

    @property
    def cut(self) -> bool:
        """True if a limit of length has ended the text."""
        return self.result.finish_reason == "length"

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.result.tokens)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that the prefix cache held."""
        return min(self.result.stats.reused, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class WholeText:
    """One text from its beginning to its end."""

    parts: list[Part]
    tokens: list[Token]  # all tokens, if their probabilities were asked for
    ending: Ending


def speculative(endings: Sequence[Ending], draft: str | None) -> dict[str, Any]:
    """Return drafting statistics of texts; a draft "auto" is shown as its sources."""
    every = [each.result.stats for each in endings]
    reached = zip_longest(*(each.reached for each in every), fillvalue=0)
    names = ("rounds", "drafts", "drafted", "accepted")
    sums: Any = {name: sum(getattr(one, name) for one in every) for name in names}
    stats = Statistics(**sums, reached=[sum(place) for place in reached])
    sources = dict.fromkeys(name for each in every for name in each.sources)
    drafted = ", ".join(sources) or None
    return {
        "draft": drafted if draft == "auto" else draft,
        "seed": endings[0].result.seed,
        **sums,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "accepted_per_position": list(stats.accepted_per_position),
        "drafter_faults": sum(len(each.drafter_faults) for each in every),
    }


class Face:
    """The format of one API, for the answer to one body.

    All methods but `whole` return events of a stream, as bytes.
    """

    def __init__(self, request: GenerationRequest, settings: Settings) -> None:
        self.request = request
        self._draft = request.draft or settings.draft

    def open(self, prompt_tokens: int) -> Iterable[bytes]:
        """Begin a stream: the request is valid, and waits for its turn."""
        return ()

    def reading(self, tokens: int, of: int) -> Iterable[bytes]:
        """Report the progress of the prefill; by default send nothing."""
        return ()

    def parts(
        self, choice: int, parts: Sequence[Part], tokens: Sequence[Token]
    ) -> Iterable[bytes]:
        """Send new parts of a text."""
        raise NotImplementedError

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """End one text."""
        raise NotImplementedError

    def close(self, endings: Sequence[Ending]) -> Iterable[bytes]:
        """End a stream whose texts have ended."""
        return ()

    def keep_alive(self) -> Iterable[bytes]:
        """Keep the connection open after seconds of silence."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """End a stream with an error."""
        raise NotImplementedError

    def whole(self, texts: Sequence[WholeText]) -> dict[str, Any]:
        """Return the whole answer of a request without a stream."""
        raise NotImplementedError


class BlockFace(Face):
    """Answers as lists of blocks, of which one is open at a time.

    White space alone makes no text block, and a text block after another block begins
    without line feeds. `end_text` sets `_answer`.
    """

    def __init__(self, request: GenerationRequest, settings: Settings) -> None:
        super().__init__(request, settings)
        self._answer: Block = {}  # the whole answer, once it has ended
        self._blocks: list[Block] = []  # the complete blocks
        self._open: type[Text] | type[Reasoning] | None = None
        self._text = ""  # of the open block
        self._spaces = ""  # white space before a text block

    def parts(
        self, choice: int, parts: Sequence[Part], tokens: Sequence[Token]
    ) -> Iterable[bytes]:
        """Send new parts of the text."""
        for part in parts:
            if isinstance(part, ToolCall):
                yield from self._closed()
                yield from self._call(part)
                continue
            text = part.text
            if self._open is not type(part):
                if isinstance(part, Text):
                    text = self._spaces + text
                    self._spaces = "" if text.strip() else text
                    if self._spaces:
                        continue
                    text = text.lstrip("\n") if self._open or self._blocks else text
                yield from self._closed()
                self._open, self._text = type(part), ""
                yield from self._begin()
            self._text += text
            yield self._delta(text)

    def whole(self, texts: Sequence[WholeText]) -> dict[str, Any]:
        """Return the whole answer, as a client would build it from the events."""
        (text,) = texts
        deque(self.parts(0, joined(text.parts), ()), maxlen=0)
        deque(self.end_text(0, text.ending), maxlen=0)
        return self._answer

    def _begin(self) -> Iterable[bytes]:
        """Open a block of the kind `_open`."""
        raise NotImplementedError

    def _delta(self, text: str) -> bytes:
        """Send a piece of the open block."""
        raise NotImplementedError

    def _closed(self, status: str = "completed") -> Iterable[bytes]:
        """Complete the open block, if there is one, and clear `_spaces`."""
        self._spaces = ""
        if self._open is not None:
            yield from self._ended(status)
            self._open = None

    def _ended(self, status: str) -> Iterable[bytes]:
        """End the open block, which becomes a complete one."""
        raise NotImplementedError

    def _call(self, call: ToolCall) -> Iterable[bytes]:
        """Send a call as a block of its own."""
        raise NotImplementedError


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event."""
    line = "" if name is None else f"event: {name}\n"
    return f"{line}data: {json.dumps(data)}\n\n".encode()
