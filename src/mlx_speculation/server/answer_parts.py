"""Division of an answer's text into content, reasoning and tool calls, for any API.

If a text between the marks of a tool call is no call, the text and its marks are
content.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import AliasChoices, Field

from mlx_speculation.server.api_errors import LOG
from mlx_speculation.server.request.content import Arguments
from mlx_speculation.server.request.models import Loose, RequestModel

_NAME = re.compile(r"[\w.:/-]+")
NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"  # `TextStateMachine`'s states


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function."""

    name: str
    arguments: str  # a JSON object
    id: str


class ParsedCall(RequestModel):
    """A call as the parsers of mlx-lm return it."""

    name: str = Field(min_length=1)
    arguments: Arguments = Field(
        {}, validation_alias=AliasChoices("arguments", "parameters")
    )
    id: Loose = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Content of an answer, or a piece of it."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thinking, or a piece of it."""

    text: str


Part = Text | Reasoning | ToolCall
# Texts of other states are dropped, except those of tool calls.
KINDS: dict[str, type[Text | Reasoning]] = {NORMAL: Text, REASONING: Reasoning}


class AnswerParser:
    """Divides one answer into its parts, as its text arrives."""

    def __init__(
        self,
        machine: Any,  # mlx-lm's `TextStateMachine`; None: all text is content
        state: str = NORMAL,  # the state in which the answer begins
        *,
        # Returns the calls of a text between marks; None: the text is no call
        read: Callable[[str], list[ToolCall] | None],
        most_calls: int | None = None,  # drop further calls; None: keep all
    ) -> None:
        self._machine, self._name = machine, state
        self._state = None if machine is None else machine.make_state(state)
        self._read, self._most = read, most_calls
        self._pending = ""  # the text that may be the beginning of a mark
        self._tool: list[str] = []  # a call's text after its first mark
        self._opened = ""  # the first mark of that call
        self.calls = 0  # the number of calls so far, dropped ones included
        self.reasoning = 0  # the number of fed pieces that began as reasoning

    def feed(self, text: str) -> Iterator[Part]:
        """Yield the parts that a piece of the text adds."""
        self.reasoning += self._name == REASONING
        if self._machine is None:
            yield from self._added(text)
            return
        # The machine does not return the text of marks. So it gets single characters:
        # each completes at most one mark, which is then the pending text.
        for char in text:
            self._pending += char
            self._state, segments = self._machine.split(self._state, char)
            before = segments[0][1]
            yield from self._added(before)
            self._pending = self._pending[len(before) :]
            for name, _ in segments[1:]:
                if self._name == TOOL:
                    yield from self._closed(self._pending)
                self._name, self._tool, self._opened = name, [], self._pending
                self._pending = ""

    def end(self) -> Iterator[Part]:
        """Yield the parts that the end of the text adds."""
        yield from self._added(self._pending)
        if self._name == TOOL:
            yield from self._closed("")

    def _added(self, text: str) -> Iterator[Part]:
        if self._name == TOOL:
            self._tool.append(text)
        elif text and self._name in KINDS:
            yield KINDS[self._name](text)

    def _closed(self, mark: str) -> Iterator[Part]:
        """Yield the calls before `mark`; if unreadable, their text with its marks."""
        text = "".join(self._tool)
        calls = self._read(text)
        if calls is None:
            yield Text(self._opened + text + mark)
            return
        room = len(calls) if self._most is None else max(0, self._most - self.calls)
        if len(calls) > room:
            LOG.warning("%d further tool calls are dropped", len(calls) - room)
        self.calls += len(calls)
        yield from calls[:room]


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return parts with adjacent pieces of text, and of reasoning, joined."""
    whole: list[Part] = []
    runs: Iterable[tuple[Any, Any]] = groupby(parts, type)
    for kind, run in runs:
        whole += run if kind is ToolCall else [kind("".join(part.text for part in run))]
    return whole


def read_calls(
    text: str,
    parser: Callable[[str, Any], Any] | None,  # of mlx-lm's tokenizer
    tools: Sequence[dict[str, Any]] | None = None,  # those of the request
) -> list[ToolCall] | None:
    """Return the tool calls of a text between marks; None: the text is no call."""
    if parser is None:
        return None
    offered, calls = {tool["function"]["name"] for tool in tools or ()}, []
    try:
        parsed = parser(text, tools)
        several = parsed if isinstance(parsed, list) else [parsed]
        for call in map(ParsedCall.model_validate, several):
            given = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
            id = call.id or f"call_{uuid.uuid4().hex[:24]}"
            calls.append(ToolCall(call.name, given, id))
    except Exception as error:  # models write anything, and parsers may raise any error
        LOG.warning("a tool call cannot be read: %s", type(error).__name__)
        return None
    # For a text that they cannot read, some parsers invent a name, or take a part of
    # the text as the name.
    named = [
        call.name in offered or (call.name in text and _NAME.fullmatch(call.name))
        for call in calls
    ]
    return calls if calls and all(named) else None
