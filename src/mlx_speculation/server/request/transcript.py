"""Messages of a chat in one form and one order, for all APIs.

system    messages at the beginning become one message; each later one becomes a
          reminder in an adjacent user turn, so that earlier tokens stay the same
results   of tools are put in the order of their calls
images    of results are put in a user turn after the results
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request.content import (
    Block,
    Blocks,
    DocumentBlock,
    ImageBlock,
    ReferenceBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    UseBlock,
)
from mlx_speculation.server.request.images import image_part
from mlx_speculation.server.request.options import Chat
from mlx_speculation.server.request.tools import Tool

Part = dict[str, Any]  # of a content: a text, or an image with its bytes
Content = str | list[Part]
Message = dict[str, Any]

REMINDER = "<system-reminder>\n{}\n</system-reminder>"
# A client's line for its billing, with values that change with every request.
BILLING = re.compile(r"\Ax-anthropic-[\w-]+:[^\n]*\n*")
IMAGE_NOTE = "[An image, which this model cannot see.]"


class Conversation:
    """Takes messages one by one; contents are the blocks of any API.

    `add` raises ApiError for a block or an image that is not allowed; the error names
    its field, `where`.
    """

    def __init__(
        self,
        settings: Settings,
        between: str = "",  # separates texts of one content
        deferred: Sequence[Tool] = (),  # tools that a block may refer to
    ) -> None:
        self._settings, self._between, self._images = settings, between, 0
        self._deferred = {tool["function"]["name"]: tool for tool in deferred}
        self._called: set[str] = set()  # ids of all calls
        self._system: list[str] = []
        self._turns: list[Message] = []
        # Results, with their images, in the order in which they came
        self._results: list[tuple[Message, list[Part]]] = []
        self._reminds = False  # whether the last turn holds reminders only

    def add(
        self,
        role: str,
        blocks: Blocks,
        where: str,
        *,
        name: str = "",  # of the user or the tool
        call: str = "",  # the id of the call whose result a tool gives
        failed: bool = False,  # whether that call has failed
        join: bool = False,  # to the message before, if that is the model's too
    ) -> None:
        """Add a message; roles other than user, assistant and tool count as system."""
        parts, more = self._read(role, blocks, where)
        images = [part for part in parts if part["type"] == "image"]
        texts = [part["text"] for part in parts if part.get("text")]
        match role:
            case "user":
                said: Any = parts if images else self._between.join(texts)
                if said or not any(isinstance(each, ResultBlock) for each in blocks):
                    self._add("user", said, name=name)
            case "assistant":
                said, between = "".join(texts), self._between
                self._add("assistant", said, join=join, between=between, **more)
            case "tool":
                empty = "Error" if failed else "The image follows." if images else ""
                said = ("\n" if images else self._between).join(texts) or empty
                message = _message("tool", said, tool_call_id=call, name=name)
                self._results.append((message, images))
            case _:
                texts = [BILLING.sub("", text) for text in texts]
                said = ("\n\n" if self._between else "").join(filter(None, texts))
                if said and (self._turns or self._results):
                    self._add("user", REMINDER.format(said), join=True, reminds=True)
                elif said:
                    self._system.append(said)

    def chat(self, tools: Sequence[Tool], template_args: dict[str, Any]) -> Chat:
        """Return all messages in order, with the images of their parts."""
        self._end_results()
        if self._system:
            self._turns.insert(0, _message("system", "\n\n".join(self._system)))
        contents = [each["content"] for each in self._turns]
        parts = [part for each in contents if isinstance(each, list) for part in each]
        return Chat(
            messages=tuple(self._turns),
            tools=tuple(tools),
            deferred=tuple(self._deferred.values()),
            template_args=template_args,
            images=tuple(part.pop("data") for part in parts if "data" in part),
        )

    def _read(
        self, role: str, blocks: Blocks, where: str
    ) -> tuple[list[Part], Message]:
        """Return a turn's text and image parts, and its thinking and calls.

        Results of tools are added as messages. If the model reads no images, a note
        replaces an image of a result.
        """
        parts, thoughts, calls = list[Part](), list[str](), list[Message]()
        for i, block in enumerate(blocks):
            place = f"{where}[{i}]"
            match role, block:
                case "assistant", ThinkingBlock():
                    thoughts.append(block.thinking)
                case "assistant", UseBlock():
                    function = {"name": block.name, "arguments": block.input}
                    named = {"id": block.id, "type": "function"}
                    calls.append({**named, "function": function})
                    self._called.add(block.id)
                case "user", ResultBlock(tool_use_id=call, is_error=failed):
                    if call not in self._called:
                        raise invalid(
                            f"{place} is the result of {call[:200]!r}, and no tool_use "
                            "before it has that id.",
                            place,
                        )
                    inner = f"{place}.content"
                    self.add("tool", block.content, inner, call=call, failed=failed)
                case _, ImageBlock() if role != "tool" or self._settings.reads_images:
                    part = image_part(block.url, place, self._settings, self._images)
                    self._images += 1
                    parts.append(part)
                case _:
                    parts.append({"type": "text", "text": self._text(block, place)})
        return parts, {"reasoning_content": "".join(thoughts), "tool_calls": calls}

    def _text(self, block: Block, where: str) -> str:
        match block:
            case TextBlock():
                return block.text
            case ImageBlock():
                return IMAGE_NOTE
            case DocumentBlock():
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

    def _add(
        self,
        role: str,
        content: Content,
        *,
        join: bool = False,  # to the turn before, if that has the same role
        between: str = "\n",
        reminds: bool = False,
        **more: Any,
    ) -> None:
        """Add a turn; a user's turn joins the last one if that holds only reminders."""
        self._end_results()
        last = self._turns[-1] if self._turns else {"role": None}
        message = _message(role, content, **more)
        if last["role"] == role and (join or self._reminds):
            self._turns[-1] = joined(last, message, between)
            self._reminds &= reminds
        else:
            self._turns.append(message)
            self._reminds = reminds

    def _end_results(self) -> None:
        """Add results in the order of their calls, then a user turn of their images."""
        if not self._results:
            return
        calls = self._turns[-1].get("tool_calls", ()) if self._turns else ()
        order = {call["id"]: place for place, call in enumerate(calls)}
        last = len(order)
        self._results.sort(key=lambda it: order.get(it[0].get("tool_call_id"), last))
        images = [image for _, seen in self._results for image in seen]
        self._turns += [message for message, _ in self._results]
        self._turns += [_message("user", images)] if images else []
        self._results, self._reminds = [], False


def _message(role: str, content: Content, **more: Any) -> Message:
    given = {name: value for name, value in more.items() if value}
    return {"role": role, "content": content, **given}


def joined(first: Message, second: Message, between: str = "\n") -> Message:
    """Return two messages of one role as one."""
    contents: list[Any] = [each["content"] for each in (first, second)]
    if all(isinstance(each, str) for each in contents):
        content: Content = between.join(text for text in contents if text)
    else:
        content = [part for each in contents for part in parts_of(each)]
    added = first.keys() & second.keys() & {"reasoning_content", "tool_calls"}
    sums = {name: first[name] + second[name] for name in added}
    return {**first, **second, "content": content, **sums}


def text_of(content: Content) -> str:
    """Return a content without its images."""
    return "".join(part.get("text", "") for part in parts_of(content))


def parts_of(content: Content) -> list[Part]:
    """Return a content as a list of parts."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
