"""Messages of a chat in one form and one order, for all APIs.

    system    the system and developer messages at the beginning become one message;
              each later one becomes a reminder in the user turn beside it, so that the
              tokens of the turns before it stay the same
    results   of tools are put in the order of their calls
    images    of results are put in a user turn after the results

Chat templates differ in more than this: see `prompts`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any

from pydantic import BeforeValidator

from mlx_speculation.json_files import JsonFlawError, parse_json
from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request.content import (
    EMPTY,
    Block,
    DocumentBlock,
    ImageBlock,
    ReferenceBlock,
    ResultBlock,
    SearchBlock,
    TextBlock,
    ThinkingBlock,
    UseBlock,
)
from mlx_speculation.server.request.images import image_part
from mlx_speculation.server.request.models import DEEPEST
from mlx_speculation.server.request.request import Chat
from mlx_speculation.server.request.tools import Tool

Part = dict[str, Any]  # of a content: a text, or an image with its bytes
Content = str | list[Part]
Message = dict[str, Any]

REMINDER = "<system-reminder>\n{}\n</system-reminder>"
# A client's line for its billing, with values that change with every request.
BILLING = re.compile(r"\Ax-anthropic-[\w-]+:[^\n]*\n*")
IMAGE_NOTE = "[An image, which this model cannot see.]"


def _arguments(given: Any) -> Any:
    """Return the arguments of an earlier call as an object, empty if there are none."""
    if not isinstance(given, str):
        return given
    try:
        read = parse_json(given, deepest=DEEPEST) if given.strip() else None
        json.dumps(read, ensure_ascii=False).encode()
    except (JsonFlawError, UnicodeEncodeError) as error:
        raise ValueError(f"it {error}") from error
    return {} if read is None else read


Arguments = Annotated[dict[str, Any], BeforeValidator(_arguments)]


class Conversation:
    """Takes messages one by one; contents are the blocks of any API."""

    def __init__(
        self,
        settings: Settings,
        between: str = "",  # separates texts of one content
        deferred: Sequence[Tool] = (),  # tools that a block may refer to
    ) -> None:
        self._settings, self._between, self._images = settings, between, 0
        self._deferred = {tool["function"]["name"]: tool for tool in deferred}
        self._messages: list[Message] = []
        self._called: set[str] = set()  # ids of all calls

    def system(self, blocks: Sequence[Block], where: str) -> None:
        """Add the first or a later system message, without a client's billing line."""
        parts = self._parts(blocks, where)
        texts = [BILLING.sub("", part.get("text", "")) for part in parts]
        between = "\n\n" if self._between else ""
        self._add("system", between.join(text for text in texts if text))

    def user(self, blocks: Sequence[Block], where: str, name: str = "") -> None:
        """Add a turn of the user: the results of tools first.

        Raises:
            ApiError: a result has no call before it.
        """
        rest = [None if isinstance(each, ResultBlock) else each for each in blocks]
        for i, block in enumerate(blocks):
            if not isinstance(block, ResultBlock):
                continue
            if block.tool_use_id not in self._called:
                raise invalid(
                    f"{where}[{i}] is the result of {block.tool_use_id[:200]!r}, and "
                    "no tool_use before it has that id.",
                    f"{where}[{i}]",
                )
            place, failed = f"{where}[{i}].content", block.is_error
            self.result(block.tool_use_id, block.content, place, failed=failed)
        said = self._parts(rest, where)
        if None not in rest or any(part != EMPTY for part in said):
            self._add("user", said, name=name)

    def assistant(
        self,
        blocks: Sequence[Block],
        where: str,
        *,
        joined: bool = False,  # to the message before, if that is the model's too
    ) -> None:
        """Add a turn of the model: texts, thinking and calls."""
        other = (ThinkingBlock, UseBlock)
        said = [None if isinstance(each, other) else each for each in blocks]
        text = "".join(part.get("text", "") for part in self._parts(said, where))
        thoughts = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
        calls: list[dict[str, Any]] = [
            {
                "id": each.id,
                "type": "function",
                "function": {"name": each.name, "arguments": each.input},
            }
            for each in blocks
            if isinstance(each, UseBlock)
        ]
        self._called |= {call["id"] for call in calls}
        more = {"reasoning_content": "".join(thoughts), "tool_calls": calls}
        last = self._messages[-1] if self._messages else {}
        if joined and last.get("role") == "assistant":
            last["content"] = self._joined([last["content"], text])
            for name, value in more.items():
                last[name] += value
        else:
            self._add("assistant", text, **more)

    def result(
        self,
        call: str,
        blocks: Sequence[Block],
        where: str,
        name: str = "",
        *,
        failed: bool = False,
    ) -> None:
        """Add the result of a tool."""
        parts = self._parts(blocks, where, result=True)
        if failed and not any(part.get("text") for part in parts):
            parts.append({"type": "text", "text": "Error"})
        self._add("tool", parts, tool_call_id=call, name=name)

    def _parts(
        self, blocks: Sequence[Block | None], where: str, *, result: bool = False
    ) -> list[Part]:
        """Return blocks as text and image parts; blocks that are None are left out."""
        parts = []
        for i, block in enumerate(blocks):
            if isinstance(block, ImageBlock) and (
                self._settings.reads_images or not result
            ):
                place = f"{where}[{i}]"
                part = image_part(block.url, place, self._settings, self._images)
                self._images += 1
                parts.append(part)
            elif block is not None:
                text = self._text(block, f"{where}[{i}]")
                parts.append({"type": "text", "text": text})
        return parts

    def _text(self, block: Block, where: str) -> str:
        match block:
            case TextBlock():
                return block.text
            case ImageBlock():
                return IMAGE_NOTE
            case DocumentBlock():
                texts = [block.title]
            case SearchBlock():
                texts = [block.title, block.source]
            case ReferenceBlock():
                tool = self._deferred.get(block.tool_name)
                if tool is None:
                    return f"The tool {block.tool_name} can be called now."
                described = json.dumps(tool, ensure_ascii=False)
                return f"This tool can be called now:\n{described}"
            case _:
                raise invalid(f"{where}: {block.type} does not belong here.", where)
        texts += [self._text(each, where) for each in block.content]
        return "\n".join(text for text in texts if text)

    def chat(self, tools: Sequence[Tool], template_args: dict[str, Any]) -> Chat:
        """Return all messages in order, with the images of their parts."""
        images: list[Any] = []
        placed: list[Message] = []
        for message in _with_reminders(self._sorted()):
            content = message["content"]
            if isinstance(content, list):
                images += [part.pop("data") for part in content if "data" in part]
            more = {name: value for name, value in message.items() if value}
            placed.append({**more, "content": content})
        return Chat(
            messages=tuple(placed),
            tools=tuple(tools),
            deferred=tuple(self._deferred.values()),
            template_args=template_args,
            images=tuple(images),
        )

    def _add(self, role: str, content: Content, **more: Any) -> None:
        if isinstance(content, list) and not any(p["type"] == "image" for p in content):
            content = self._joined([part["text"] for part in content])
        self._messages.append({"role": role, "content": content, **more})

    def _joined(self, texts: Sequence[str]) -> str:
        return self._between.join(text for text in texts if text)

    def _sorted(self) -> Iterator[Message]:
        """Yield the messages with each run of results in the order of its calls."""
        order: dict[str, int] = {}
        for of_tools, run in groupby(self._messages, lambda m: m["role"] == "tool"):
            if of_tools:
                last = len(order)
                placed = sorted(run, key=lambda m: order.get(m["tool_call_id"], last))
                yield from _without_images(placed)
                continue
            for message in run:
                calls = message.get("tool_calls", ())
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


def _with_reminders(messages: Iterator[Message]) -> list[Message]:
    """Return messages with one system message; later ones become reminders."""
    leading: list[str] = []
    turns: list[Message] = []
    reminds = False  # whether the last turn holds reminders only
    for message in messages:
        reminder = message["role"] == "system"
        if reminder:
            text = message["content"]
            if not turns or not text:
                leading += [text] if text else []
                continue
            message = {"role": "user", "content": REMINDER.format(text)}
        both_users = turns and turns[-1]["role"] == message["role"] == "user"
        if both_users and (reminder or reminds):
            turns[-1] = joined(turns[-1], message)
            reminds &= reminder
        else:
            turns.append(message)
            reminds = reminder
    system = {"role": "system", "content": "\n\n".join(leading)}
    return [system, *turns] if leading else turns


def joined(first: Message, second: Message, between: str = "\n") -> Message:
    """Return two messages of one role as one."""
    contents: list[Any] = [each["content"] for each in (first, second)]
    if all(isinstance(each, str) for each in contents):
        content: Content = between.join(text for text in contents if text)
    else:
        content = [part for each in contents for part in parts_of(each)]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    more = {"tool_calls": calls} if calls else {}
    return {**first, **second, "content": content, **more}


def parts_of(content: Content) -> list[Part]:
    """Return a content as a list of parts."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
