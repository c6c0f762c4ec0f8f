"""Division of an answer's text into content, reasoning and tool calls, for any API.

    parser = AnswerParser(marks, read=partial(read_calls, parser=tokenizer.tool_parser))
    parser.feed(text)       # the parts that a piece of the text adds, in order
    parser.end()            # the parts of text that was held back as a possible mark

If the text between the marks of a tool call is not a call, it is content, as are these
marks.
"""

import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LOG = logging.getLogger("mlx_speculation.server")
_NAME = re.compile(r"[\w.:/-]+")
NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"  # `TextStateMachine`'s states


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function."""

    name: str  # of the function
    arguments: str  # a JSON object
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True)
class Text:
    """Content of an answer, or a piece of it."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thinking, or a piece of it."""

    text: str


Part = Text | Reasoning | ToolCall


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts that mark thinking and tool calls in the answers of a tokenizer."""

    machine: Any  # mlx-lm's `TextStateMachine`: divides a text, and drops marks
    texts: tuple[str, ...]  # all marks

    def first(self, text: str) -> str:
        """Return the shortest mark that a text begins with, as the machine does."""
        return min((each for each in self.texts if text.startswith(each)), key=len)


class AnswerParser:
    """Divides one answer into its parts, as its text arrives."""

    def __init__(
        self,
        marks: Marks | None,  # None: all text is content
        state: str = NORMAL,  # the state in which the answer begins
        *,
        # Returns the calls of a text between marks; None: the text is no call
        read: Callable[[str], list[ToolCall] | None],
        most_calls: int | None = None,  # drop further calls; None: keep all
    ) -> None:
        self._marks, self._name = marks, state
        self._state = None if marks is None else marks.machine.make_state(state)
        self._read, self._most = read, most_calls
        self._left = ""  # the text that is not divided yet
        self._tool = self._opened = ""  # a call's text, and its first mark
        self._calls = 0

    @property
    def thinking(self) -> bool:
        """True if the next text is reasoning."""
        return self._name == REASONING

    def feed(self, text: str) -> list[Part]:
        """Return the parts that a piece of the text adds."""
        if self._marks is None:
            return [Text(text)] if text else []
        self._left += text
        self._state, segments = self._marks.machine.split(self._state, text)
        return self._parts(segments)

    def end(self) -> list[Part]:
        """Return the parts that the end of the text adds."""
        if self._marks is None:
            return []
        self._state, text, state = self._marks.machine.flush(self._state)
        parts = self._parts([(state, text)])
        if self._name == TOOL:
            self._close("", parts)
        return parts

    def _parts(self, segments: Iterable[tuple[str, str]]) -> list[Part]:
        parts: list[Part] = []
        for index, (name, text) in enumerate(segments):
            if index:
                self._pass_mark(name, parts)
            self._left = self._left[len(text) :]
            if name == TOOL:
                self._tool += text
            elif text and name == REASONING:
                parts.append(Reasoning(text))
            elif text and name == NORMAL:
                parts.append(Text(text))
        return parts

    def _pass_mark(self, name: str, parts: list[Part]) -> None:
        assert self._marks is not None
        mark = self._marks.first(self._left)
        self._left = self._left[len(mark) :]
        if self._name == TOOL:
            self._close(mark, parts)
        if name == TOOL:
            self._tool, self._opened = "", mark
        self._name = name

    def _close(self, mark: str, parts: list[Part]) -> None:
        """Add the calls before `mark`; if their text cannot be read, add that text."""
        calls = self._read(self._tool)
        if calls is None:
            parts.append(Text(self._opened + self._tool + mark))
            return
        room = len(calls) if self._most is None else max(0, self._most - self._calls)
        if len(calls) > room:
            LOG.warning("%d further tool calls are dropped", len(calls) - room)
        parts += calls[:room]
        self._calls += len(calls)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return parts with adjacent pieces of text, and of reasoning, joined."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, Text | Reasoning) and isinstance(last, type(part)):
            whole[-1] = type(part)(last.text + part.text)
        else:
            whole.append(part)
    return whole


def read_calls(
    text: str,
    parser: Callable[[str, Any], Any] | None,  # of mlx-lm's tokenizer
    tools: Sequence[dict[str, Any]] | None = None,  # those of the request
) -> list[ToolCall] | None:
    """Return the tool calls of a text between marks; None: the text is no call."""
    if parser is None:
        return None
    offered = {tool["function"]["name"] for tool in tools or ()}
    try:
        parsed = parser(text, tools)
        several = parsed if isinstance(parsed, list) else [parsed]
        calls = [_call(one) for one in several]
    except Exception as error:  # models write anything, and parsers may raise any error
        LOG.warning("a tool call cannot be read: %s", type(error).__name__)
        return None
    # Some parsers invent a name for a text that they cannot read, or cut one from it.
    named = [
        call.name in offered or (call.name in text and _NAME.fullmatch(call.name))
        for call in calls
    ]
    return calls if calls and all(named) else None


def _call(parsed: Any) -> ToolCall:
    """Return a parser's result as a `ToolCall`; or raise `ValueError`."""
    name = parsed.get("name") if isinstance(parsed, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("it has no name")
    arguments = parsed.get("arguments", parsed.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    given = parsed.get("id")
    return (
        ToolCall(name, text, given) if isinstance(given, str) else ToolCall(name, text)
    )
