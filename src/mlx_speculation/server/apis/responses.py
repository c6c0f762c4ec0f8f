"""The Responses API: items of requests and answers, and the events of streams.

Kinds of tools:

    namespace   a group of tools; the chat template names a tool NAMESPACE__NAME, and
                an answer gives the namespace and the tool's own name
    custom      a tool that takes a text becomes a function with the argument "input"
    other kinds, which OpenAI's servers would run, are ignored

No response is stored: fields that name an earlier response are refused. All events of
an item have the item's id, and the events of a stream are numbered from 0 on.
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mlx_speculation.samplers import Sampling
from mlx_speculation.server.answer_parts import Reasoning, Text, ToolCall
from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.apis.base import (
    Block,
    BlockFace,
    Ending,
    event,
    speculative,
)
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request.content import (
    Content,
    TextBlock,
    ThinkingBlock,
    UseBlock,
)
from mlx_speculation.server.request.models import Loose, Object, RequestModel
from mlx_speculation.server.request.options import (
    Count,
    FormatConfig,
    Switch,
    TextOptions,
    generation,
    thinking,
)
from mlx_speculation.server.request.request import GenerationRequest
from mlx_speculation.server.request.tools import Choice, Kind, ToolBody, Toolbox, flat
from mlx_speculation.server.request.transcript import Arguments, Conversation

STATEFUL = {  # fields that refer to stored objects, with their error codes
    "previous_response_id": "previous_response_not_found",
    "conversation": "unsupported_parameter",
    "prompt": "unsupported_parameter",
}
ECHOED: Object = {  # fields that the response repeats, with their defaults
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "max_output_tokens": None,
}
# By kind of block: the type of its item, the prefix of the item's id, the part's type.
NAMES: dict[type | None, tuple[str, str, str]] = {
    Text: ("message", "msg", "output_text"),
    Reasoning: ("reasoning", "rs", "reasoning_text"),
}


class MessageItem(RequestModel):
    """A message; its type may be left out."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = Field([])


class CallItem(RequestModel):
    """A call of a function or of a custom tool."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: Loose = ""
    arguments: Arguments = Field({})

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Take the text for a custom tool as the argument "input"."""
        if values.get("type") == "custom_tool_call":
            values["arguments"] = {"input": str(values.get("input", ""))}

    @property
    def block(self) -> UseBlock:
        """The call under its flat name."""
        name = flat(self.name, self.namespace)
        return UseBlock(
            type="tool_use", id=self.call_id, name=name, input=self.arguments
        )


class OutputItem(RequestModel):
    """The output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content = Field([])


class ReasoningItem(RequestModel):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    content: Content = Field([])
    summary: Content = Field([])


def _items(given: Any) -> Any:
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    items = []
    for i, each in enumerate(given):
        if isinstance(each, dict):
            each = {**each, "type": each.get("type") or "message"}
            if each["type"] == "item_reference":
                raise invalid(
                    f"input[{i}] refers to a stored item, and this server stores none. "
                    "Send the item itself, as clients do with store: false.",
                    f"input[{i}]",
                )
        items.append(each)
    return items


Item = Annotated[
    MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")
]


class ResponsesBody(TextOptions):
    """A request for the next items."""

    lengths: ClassVar[Sequence[str]] = ("max_output_tokens",)

    input: Annotated[list[Item], BeforeValidator(_items), Field(min_length=1)]
    instructions: Content = Field([])
    tools: list[ToolBody] = Field([])
    tool_choice: str | Choice | None = None
    parallel_tool_calls: bool = True
    text: FormatConfig = FormatConfig()
    reasoning: Switch = Switch()
    max_output_tokens: Count | None = None
    metadata: Object = Field({})
    echo: Object = Field({})  # fields that the response repeats

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Set `echo`; refuse fields that need stored responses."""
        values["echo"] = {name: values.get(name, to) for name, to in ECHOED.items()}
        for name, code in STATEFUL.items():
            if name in values:
                raise invalid(
                    f"{name} is given, and this server stores no responses. Send the "
                    "items of the turns before in input.",
                    name,
                    code=code,
                )
        if values.get("background"):
            raise invalid("background is not offered here. Leave it out.", "background")


def responses_request(body: ResponsesBody, settings: Settings) -> GenerationRequest:
    """Check a request, and return it in the common form."""
    tools, calls = Toolbox(body.tools).chosen(body.tool_choice)
    effort = body.reasoning.effort
    args, _ = thinking(on=effort != "none" if effort else None, effort=effort)
    return generation(
        body,
        settings,
        chat=_conversation(body, settings).chat(tools, args),
        calls=calls,
        form=body.text.format,
        parallel=body.parallel_tool_calls,
    )


def _conversation(body: ResponsesBody, settings: Settings) -> Conversation:
    conversation, thoughts = Conversation(settings, "\n"), list[ThinkingBlock]()
    conversation.system(body.instructions, "instructions")
    for i, item in enumerate(body.input):
        where = f"input[{i}].content"
        match item:
            case MessageItem(role="system" | "developer"):
                conversation.system(item.content, where)
            case MessageItem(role="user"):
                conversation.user(item.content, where)
                thoughts = []  # drops the reasoning of an answer that was cut
            case OutputItem():
                conversation.result(item.call_id, item.output, f"input[{i}].output")
            case ReasoningItem():
                thoughts += [
                    ThinkingBlock(type="thinking", thinking=each.text)
                    for each in item.content or item.summary
                    if isinstance(each, TextBlock)
                ]
            case _:
                said = [item.block] if isinstance(item, CallItem) else item.content
                conversation.assistant([*said, *thoughts], where, join=True)
                thoughts = []
    return conversation


class ResponsesFace(BlockFace):
    """The Responses API."""

    def __init__(self, body: ResponsesBody, settings: Settings) -> None:
        super().__init__(responses_request(body, settings), settings)
        self._kinds = Toolbox(body.tools).kinds
        self._head = _head(body, self.request.sampling, settings)
        self._number = 0  # of the next event
        self._id = ""  # of the open item

    def open(self, prompt_tokens: int) -> Iterable[bytes]:
        """Begin a response."""
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def keep_alive(self) -> Iterable[bytes]:
        """Repeat the event `in_progress`, since clients ignore comments."""
        yield self._event("in_progress", response=self._response("in_progress"))

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """End the response."""
        status = "incomplete" if ending.cut else "completed"
        yield from self._closed(status)
        self._answer = self._response(status, ending)
        yield self._event(status, response=self._answer)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """End with an error that has the code that clients expect."""
        code = error.code if error.status < 500 else "server_error"
        response = self._response("failed")
        response["error"] = {"code": code or error.type, "message": error.message}
        yield self._event("failed", response=response)

    def _response(self, status: str, ending: Ending | None = None) -> dict[str, Any]:
        """Return the response as it is now."""
        response = {**self._head, "status": status, "output": [*self._blocks]}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if ending is not None:
            response["usage"] = self._usage(ending)
            response["completed_at"] = int(time.time())
        return response

    def _usage(self, ending: Ending) -> dict[str, Any]:
        details = {"cached_tokens": ending.cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": ending.prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": ending.tokens,
            "output_tokens_details": {"reasoning_tokens": ending.reasoning_tokens},
            "total_tokens": ending.prompt_tokens + ending.tokens,
            "speculative": speculative([ending], self._draft),
        }

    def _begin(self) -> Iterator[bytes]:
        self._id = _id(NAMES[self._open][1])
        item = {**self._item("in_progress"), "content": []}
        yield self._of_item("output_item.added", item=item)
        if self._open is Text:
            yield self._of_part("content_part.added", part=self._part())

    def _delta(self, text: str) -> bytes:
        return self._of_part(f"{NAMES[self._open][2]}.delta", delta=text)

    def _ended(self, status: str) -> Iterator[bytes]:
        yield self._of_part(f"{NAMES[self._open][2]}.done", text=self._text)
        if self._open is Text:
            yield self._of_part("content_part.done", part=self._part())
        item = self._item(status)
        yield self._of_item("output_item.done", item=item)
        self._blocks.append(item)

    def _item(self, status: str) -> Block:
        """Return the open item."""
        kind = NAMES[self._open][0]
        more: Block = {"role": "assistant"}
        if self._open is Reasoning:
            more = {"summary": [], "encrypted_content": None}
        item = {"id": self._id, "type": kind, **more, "status": status}
        return {**item, "content": [self._part()]}

    def _part(self) -> Block:
        part = {"type": NAMES[self._open][2], "text": self._text}
        more: Block = {"annotations": [], "logprobs": []} if self._open is Text else {}
        return {**part, **more}

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        item = self._call_item(call)
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        empty = {**item, field: "", "status": "in_progress"}
        yield self._of_item("output_item.added", item=empty)
        name = f"{item['type']}_{field}"
        place = {"item_id": item["id"], "output_index": len(self._blocks)}
        value = item[field]
        yield self._event(f"{name}.delta", **place, delta=value)
        done = {field: value}
        if field == "arguments":
            done["name"] = item["name"]
        yield self._event(f"{name}.done", **place, **done)
        yield self._of_item("output_item.done", item=item)
        self._blocks.append(item)

    def _call_item(self, call: ToolCall) -> Block:
        """Return a call under the names that the client has given its tool."""
        kind = self._kinds.get(call.name, Kind(call.name))
        item = {"status": "completed", "call_id": call.id, "name": kind.name}
        if kind.namespace is not None:
            item["namespace"] = kind.namespace
        if not kind.custom:
            made = {"id": _id("fc"), "type": "function_call"}
            return {**made, **item, "arguments": call.arguments}
        arguments = json.loads(call.arguments)
        text = arguments.get("input", call.arguments)
        shown = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        return {"id": _id("ctc"), "type": "custom_tool_call", **item, "input": shown}

    def _of_part(self, name: str, /, **fields: Any) -> bytes:
        place: Block = {"item_id": self._id, "output_index": len(self._blocks)}
        if name.startswith("output_text"):
            place["logprobs"] = []
        return self._event(name, **place, content_index=0, **fields)

    def _of_item(self, name: str, /, **fields: Any) -> bytes:
        return self._event(name, output_index=len(self._blocks), **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _head(
    body: ResponsesBody, sampling: Sampling, settings: Settings
) -> dict[str, Any]:
    """Return the fields that a response has in all its states."""
    form = body.text.format.model_dump(by_alias=True, exclude_none=True)
    if form["type"] == "json_schema":
        form["name"] = "schema"
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": settings.names[0],
        "error": None,
        "incomplete_details": None,
        **body.echo,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": False,
        "text": {"format": form},
        "truncation": "disabled",
        "usage": None,
    }


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
