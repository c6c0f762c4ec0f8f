"""Bodies of the Responses API: items in, and the tools of Codex and OpenAI's SDK.

    namespace   its tools are flattened for the chat template; calls get both names back
    custom      a tool that takes a text is a function with the argument "input"
    other kinds are run by OpenAI's servers, and passed over

No response is stored: fields that name an earlier one are refused.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request import Conversation, GenerationRequest
from mlx_speculation.server.request import options as read
from mlx_speculation.server.request.content import (
    Block,
    Content,
    Loose,
    TextBlock,
    ThinkingBlock,
    UseBlock,
)
from mlx_speculation.server.request.models import RequestModel
from mlx_speculation.server.request.options import Count, Object, TextOptions
from mlx_speculation.server.request.tools import Choice, ToolBody, Toolbox, flat
from mlx_speculation.server.request.transcript import Arguments

STATEFUL = {  # fields that name what was stored before
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


class TextConfig(RequestModel):
    """Form of the text."""

    format: read.TextFormat | None = None


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
        """Take the text of a custom tool as the argument "input"."""
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
    """Reasoning that is replayed."""

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

    input: Annotated[list[Item], BeforeValidator(_items), Field(min_length=1)]
    instructions: Content = Field([])
    tools: list[ToolBody] = Field([])
    tool_choice: str | Choice | None = None
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: read.Switch = read.Switch()
    max_output_tokens: Count | None = None
    metadata: Object = Field({})
    echo: Object = Field({})  # fields that the response shows as they came

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Refuse fields that need a store."""
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
    """Check a request."""
    chosen = Toolbox(body.tools).chosen(body.tool_choice)
    conversation = _conversation(body, settings)
    effort = body.reasoning.effort
    args, _ = read.thinking(on=effort != "none" if effort else None, effort=effort)
    most = settings.limits.max_tokens
    read.at_most(body.max_output_tokens, most, "max_output_tokens", "max-tokens-limit")
    return read.generation(
        body,
        settings,
        {},
        max_tokens=body.max_output_tokens or most or None,
        chat=conversation.chat(chosen, args),
        schema=read.schema_of(body.text.format, "text.format"),
        calls=chosen.needed,
        most_calls=None if body.parallel_tool_calls else 1,
    )


def _conversation(body: ResponsesBody, settings: Settings) -> Conversation:
    conversation, thoughts = Conversation(settings, "\n"), list[Block]()
    conversation.system(body.instructions, "instructions")
    for i, item in enumerate(body.input):
        where = f"input[{i}].content"
        match item:
            case MessageItem(role="system" | "developer"):
                conversation.system(item.content, where)
            case MessageItem(role="user"):
                conversation.user(item.content, where)
                thoughts = []  # of an answer that was cut
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
                conversation.assistant([*said, *thoughts], where, joined=True)
                thoughts = []
    return conversation
