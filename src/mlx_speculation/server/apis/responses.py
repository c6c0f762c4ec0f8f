"""The Responses API: items of requests and answers, and the events of streams.

No response is stored: fields that name an earlier response are refused. All events of
an item have the item's id, and the events of a stream are numbered from 0 on.
"""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mlx_speculation.server.answer_parts import Part, Reasoning, Text, ToolCall
from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.apis.base import BlockFace, speculative
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job
from mlx_speculation.server.request.content import (
    Blocks,
    Called,
    Content,
    TextBlock,
    ThinkingBlock,
)
from mlx_speculation.server.request.models import Object, RequestModel
from mlx_speculation.server.request.options import (
    Count,
    FormatConfig,
    GenerationRequest,
    Switch,
    TextOptions,
    generation,
    thinking,
)
from mlx_speculation.server.request.tools import Choice, ToolBody, Toolbox
from mlx_speculation.server.request.transcript import Conversation

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
# By kind of item: the prefix of its id, the name of its events, and fixed fields.
KINDS: dict[str, tuple[str, str, Object]] = {
    "message": ("msg", "output_text", {"role": "assistant"}),
    "reasoning": ("rs", "reasoning_text", {"summary": [], "encrypted_content": None}),
    "function_call": ("fc", "function_call_arguments", {}),
    "custom_tool_call": ("ctc", "custom_tool_call_input", {}),
}


class MessageItem(RequestModel):
    """A message; its type may be left out."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = Field([])


class CallItem(Called):
    """A call of a function or of a custom tool."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str

    @property
    def content(self) -> Blocks:
        """The content of a message with the call."""
        return [self.block(self.call_id)]


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
    for i, each in enumerate(given):
        if isinstance(each, dict) and each.get("type") == "item_reference":
            raise invalid(
                f"input[{i}] refers to a stored item, and this server stores none. "
                "Send the item itself, as clients do with store: false.",
                f"input[{i}]",
            )
    typed = {"type": "message"}
    return [
        each | typed if isinstance(each, dict) and not each.get("type") else each
        for each in given
    ]


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
                    "items of earlier turns in input.",
                    name,
                    code=code,
                )
        if values.get("background"):
            raise invalid("background is not offered here. Leave it out.", "background")

    def request(self, settings: Settings) -> GenerationRequest:
        """Check the fields, and return them as a `GenerationRequest`."""
        tools, calls = Toolbox(self.tools).chosen(self.tool_choice)
        conversation, thoughts = Conversation(settings, "\n"), list[ThinkingBlock]()
        conversation.add("system", self.instructions, "instructions")
        for i, item in enumerate(self.input):
            where = f"input[{i}]"
            match item:
                case OutputItem(call_id=call, output=said):
                    conversation.add("tool", said, f"{where}.output", call=call)
                case ReasoningItem():
                    thoughts += [
                        ThinkingBlock(thinking=each.text)
                        for each in item.content or item.summary
                        if isinstance(each, TextBlock)
                    ]
                case CallItem() | MessageItem(role="assistant"):
                    said = [*item.content, *thoughts]
                    conversation.add("assistant", said, f"{where}.content", join=True)
                    thoughts = []
                case _:
                    conversation.add(item.role, item.content, f"{where}.content")
                    # Reasoning before a user's turn belongs to an answer that was cut.
                    thoughts = [] if item.role == "user" else thoughts
        effort = self.reasoning.effort
        args, _ = thinking(on=effort != "none" if effort else None, effort=effort)
        return generation(
            self,
            settings,
            chat=conversation.chat(tools, args),
            calls=calls,
            form=self.text.format,
            parallel=self.parallel_tool_calls,
        )


class ResponsesFace(BlockFace):
    """The Responses API."""

    def __init__(self, body: ResponsesBody, settings: Settings) -> None:
        super().__init__(body, settings)
        self._tools = Toolbox(body.tools).kinds
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        if form["type"] == "json_schema":
            form["name"] = "schema"
        sampling = self.request.sampling
        self._head = {
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
        self._number = 0  # of the next event
        self._item: Object = {}  # the open item, without its text
        self._name = self._field = ""  # names of its events, and of their text field

    def open(self, choice: int, prompt_tokens: int) -> None:
        """Begin a response."""
        self._event("created", response=self._response("in_progress"))
        self.keep_alive()

    def keep_alive(self) -> None:
        """Repeat the event `in_progress`, since clients ignore SSE comments."""
        self._event("in_progress", response=self._response("in_progress"))

    def end_text(self, choice: int, job: Job) -> None:
        """End the response."""
        status = "incomplete" if job.cut else "completed"
        self._closed(status)
        self.answer = self._response(status, job)
        self._event(status, response=self.answer)

    def failed(self, error: ApiError) -> None:
        """End with an error that has the code that clients expect."""
        code = error.code if error.status < 500 else "server_error"
        response = self._response("failed")
        response["error"] = {"code": code or error.type, "message": error.message}
        self._event("failed", response=response)

    def _response(self, status: str, job: Job | None = None) -> Object:
        response = {**self._head, "status": status, "output": self._blocks}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if job is not None:
            response["completed_at"] = int(time.time())
            cached, tokens = job.result.stats.reused, len(job.result.tokens)
            response["usage"] = {
                "input_tokens": job.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": cached,
                    "cache_write_tokens": 0,
                },
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": job.parser.reasoning},
                "total_tokens": job.prompt_tokens + tokens,
                "speculative": speculative([job.result], self._draft),
            }
        return response

    def _tool(self, call: ToolCall) -> ToolBody:
        return self._tools.get(call.name, ToolBody.model_construct(name=call.name))

    def _arguments(self, call: ToolCall) -> str:
        if not self._tool(call).custom:
            return call.arguments
        text = json.loads(call.arguments).get("input", call.arguments)
        return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)

    def _begin(self, part: Part) -> None:
        kind, more = "reasoning" if isinstance(part, Reasoning) else "message", {}
        if isinstance(part, ToolCall):
            tool = self._tool(part)
            kind = "custom_tool_call" if tool.custom else "function_call"
            more = {"call_id": part.id, "name": tool.name}
            if tool.namespace:
                more["namespace"] = tool.namespace
        prefix, self._name, fixed = KINDS[kind]
        self._field = self._name.rpartition("_")[2]
        self._item = {"id": _id(prefix), "type": kind, **fixed, **more}
        item = self._whole("in_progress", [])
        self._of_item("output_item.added", item=item)
        if isinstance(part, Text):
            self._of_part("content_part.added", part=self._content())

    def _delta(self, part: Part, text: str) -> None:
        self._of_part(f"{self._name}.delta", delta=text)

    def _ended(self, part: Part, status: str) -> None:
        done = {self._field: self._text}
        if self._field == "arguments":
            done["name"] = self._item["name"]
        self._of_part(f"{self._name}.done", **done)
        if isinstance(part, Text):
            self._of_part("content_part.done", part=self._content())
        item = self._whole(status, [self._content()])
        self._of_item("output_item.done", item=item)
        self._blocks.append(item)

    def _whole(self, status: str, content: list[Object]) -> Object:
        """Return the open item with `content`; a call gets its text instead."""
        text: Object = {self._field: self._text}
        said = {"content": content} if "text" in text else text
        return {**self._item, "status": status, **said}

    def _content(self) -> Object:
        part: Object = {"type": self._name, "text": self._text}
        if self._name == "output_text":
            part |= {"annotations": [], "logprobs": []}
        return part

    def _of_part(self, name: str, /, **fields: Any) -> None:
        if self._field == "text":
            fields["content_index"] = 0
        if name.startswith("output_text"):
            fields["logprobs"] = []
        return self._of_item(name, item_id=self._item["id"], **fields)

    def _of_item(self, name: str, /, **fields: Any) -> None:
        self._event(name, output_index=len(self._blocks), **fields)

    def _event(self, name: str, /, **fields: Any) -> None:
        kind = f"response.{name}"
        number, self._number = self._number, self._number + 1
        self._send({"type": kind, "sequence_number": number, **fields}, kind)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
