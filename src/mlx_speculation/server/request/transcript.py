"""Messages of a chat in one form, whichever API they came by, and in one order.

    system    the run of system and developer messages that leads is one message;
              each later one is a reminder in the user turn beside it, so that what was
              read of the turns before stays as it was
    results   of tools stand in the order of their calls, however they came
    images    of a result stand in a user turn behind the results

Chat templates differ in more than this: see `prompts`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_speculation.json_files import JsonFlawError, parse_json
from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.request.json_body import DEEPEST

Part = dict[str, Any]  # of a content: a text, or an image with its bytes
Content = str | list[Part]
Message = dict[str, Any]

REMINDER = "<system-reminder>\n{}\n</system-reminder>"
IMAGE_NOTE = "[An image, which this model cannot see.]"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool in the history."""

    id: str
    name: str
    arguments: dict[str, Any]

    def as_object(self) -> dict[str, Any]:
        """Return the call in the form that chat templates know."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Conversation:
    """Takes messages one by one.

    Args:
        between: what stands between two texts of one content.
    """

    def __init__(self, between: str = "") -> None:
        self._between = between
        self._messages: list[Message] = []
        self.called: set[str] = set()  # ids of all calls

    def __len__(self) -> int:
        return len(self._messages)

    def system(self, text: str) -> None:
        """Add instructions, wherever they stand."""
        self._add("system", text)

    def user(self, content: Content, name: str | None = None) -> None:
        """Add a turn of the user."""
        self._add("user", content, name=name)

    def assistant(
        self,
        text: str,
        *,
        reasoning: str = "",
        calls: Sequence[Call] = (),
        joined: bool = False,  # to the message before, if that is the model's too
    ) -> None:
        """Add what the model has said."""
        self.called |= {call.id for call in calls}
        named = [call.as_object() for call in calls]
        last = self._messages[-1] if self._messages else {}
        if joined and last.get("role") == "assistant":
            last["content"] = self._joined([last["content"], text])
            last["reasoning_content"] = last.get("reasoning_content", "") + reasoning
            last["tool_calls"] = [*last.get("tool_calls", ()), *named]
        else:
            more = {"reasoning_content": reasoning, "tool_calls": named}
            self._add("assistant", text, **more)

    def result(self, call: str, content: Content, name: str | None = None) -> None:
        """Add what a tool has answered."""
        self._add("tool", content, tool_call_id=call, name=name)

    def messages(self) -> tuple[tuple[Message, ...], tuple[Any, ...]]:
        """Return all messages in order, and the images of their parts."""
        images: list[Any] = []
        placed: list[Message] = []
        for message in _with_reminders(self._sorted(), self._joined):
            content = message["content"]
            if isinstance(content, list):
                images += [part["data"] for part in content if part["type"] == "image"]
                shown = [
                    {"type": "image"} if part["type"] == "image" else part
                    for part in content
                ]
                message = {**message, "content": shown}
            more = {name: value for name, value in message.items() if value}
            placed.append({**more, "content": message["content"]})
        return tuple(placed), tuple(images)

    def _add(self, role: str, content: Content, **more: Any) -> None:
        if isinstance(content, list) and not any(p["type"] == "image" for p in content):
            content = self._joined([part["text"] for part in content])
        self._messages.append({"role": role, "content": content, **more})

    def _joined(self, texts: Sequence[str]) -> str:
        return self._between.join(text for text in texts if text)

    def _sorted(self) -> Iterator[Message]:
        """Yield the messages with each run of results in the order of its calls."""
        run: list[Message] = []
        order: dict[str, int] = {}
        for message in [*self._messages, None]:
            if message is not None and message["role"] == "tool":
                run.append(message)
                continue
            run.sort(key=lambda each: order.get(each["tool_call_id"], len(order)))
            yield from _without_images(run)
            run = []
            if message is not None:
                calls = message.get("tool_calls") or ()
                order = {call["id"]: place for place, call in enumerate(calls)}
                yield message


def _without_images(results: Sequence[Message]) -> Iterator[Message]:
    """Yield results as texts, then a user turn with their images."""
    images: list[Part] = []
    for message in results:
        content = message["content"]
        if isinstance(content, list):
            texts = [part["text"] for part in content if part["type"] == "text"]
            images += [part for part in content if part["type"] == "image"]
            content = "\n".join(texts) or "The image follows."
        yield {**message, "content": content}
    if images:
        yield {"role": "user", "content": images}


def _with_reminders(messages: Iterator[Message], joined: Any) -> list[Message]:
    """Return messages with one system message, and others within user turns."""
    leading: list[str] = []
    rest: list[Message] = []
    waiting: list[str] = []  # reminders that the next user turn begins with
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system":
            if not rest:
                leading.append(content)
            elif content and rest[-1]["role"] == "user" and not waiting:
                rest[-1] = _extended(rest[-1], REMINDER.format(content), after=True)
            elif content:
                waiting.append(REMINDER.format(content))
            continue
        if waiting and role != "user":
            rest.append({"role": "user", "content": "\n".join(waiting)})
        elif waiting:
            message = _extended(message, "\n".join(waiting), after=False)
        waiting = []
        rest.append(message)
    if waiting:
        rest.append({"role": "user", "content": "\n".join(waiting)})
    text = "\n\n".join(text for text in leading if text)
    return [{"role": "system", "content": text}, *rest] if text else rest


def _extended(message: Message, text: str, *, after: bool) -> Message:
    content = message["content"]
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        extended: Content = [*content, part] if after else [part, *content]
    else:
        pair = (content, text) if after else (text, content)
        extended = "\n".join(each for each in pair if each)
    return {**message, "content": extended}


def read_arguments(given: Any, where: str) -> dict[str, Any]:
    """Return the arguments of a call in the history; none are an empty object.

    Raises:
        ApiError: they are no JSON object.
    """
    if isinstance(given, str):
        if not given.strip():
            return {}
        try:
            given = parse_json(given, deepest=DEEPEST)
            json.dumps(given, ensure_ascii=False).encode()
        except (JsonFlawError, UnicodeEncodeError) as error:
            raise invalid(f"{where} {error}.", where) from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise invalid(f"{where} is no JSON object.", where)
    return given
