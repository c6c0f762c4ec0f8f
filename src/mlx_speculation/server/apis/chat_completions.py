"""Chat Completions: bodies (with the fields that agents add), chunks and messages.

Unknown fields of messages are ignored: agents send answers back, with fields of their
own. Unknown fields of the body are refused: see `StrictModel`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import AliasChoices, Field

from mlx_speculation.server.answer_parts import Part, Reasoning, Text, ToolCall
from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.apis.base import Ending
from mlx_speculation.server.apis.openai import (
    OpenAIBody,
    OpenAIFace,
    openai_request,
)
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Token
from mlx_speculation.server.request.content import (
    Block,
    Content,
    TextBlock,
    ThinkingBlock,
    UseBlock,
)
from mlx_speculation.server.request.models import Loose, Object, RequestModel
from mlx_speculation.server.request.options import Natural, Switch, thinking
from mlx_speculation.server.request.request import GenerationRequest
from mlx_speculation.server.request.tools import Choice, ToolBody, Toolbox
from mlx_speculation.server.request.transcript import Arguments, Conversation

BROKEN = "\N{REPLACEMENT CHARACTER}"
# Keywords of `apply_chat_template` that a request may not set. For example, a client's
# own template could run for ever.
RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message"),
        *("conversation", "documents", "max_length", "messages", "padding"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"),
        *("tokenizer_kwargs", "tools", "truncation"),
    )
)


class Prediction(RequestModel):
    """A text that the answer may resemble."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """All texts of the content."""
        blocks = self.content
        return "".join(each.text for each in blocks if isinstance(each, TextBlock))


class CalledFunction(RequestModel):
    """The function, or the custom tool, of a tool call in the history."""

    name: str
    arguments: Arguments = Field({})

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Take the text for a custom tool as the argument "input"."""
        if "input" in values:
            values["arguments"] = {"input": str(values["input"])}


class ToolCallBody(RequestModel):
    """A tool call in the history."""

    id: Loose = ""
    function: CalledFunction = Field(
        validation_alias=AliasChoices("function", "custom")
    )


class ChatMessage(RequestModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field([])
    name: Loose = ""
    tool_call_id: Loose = ""
    tool_calls: list[ToolCallBody] = Field([])
    reasoning_content: Loose = ""
    reasoning: Loose = ""

    def replayed(self) -> Iterator[Block]:
        """Yield the reasoning and calls of an earlier answer as blocks."""
        thought = self.reasoning_content or self.reasoning
        yield ThinkingBlock(type="thinking", thinking=thought)
        for i, each in enumerate(self.tool_calls):
            name, given = each.function.name, each.function.arguments
            yield UseBlock(
                type="tool_use", id=each.id or f"call_{i}", name=name, input=given
            )


class ChatBody(OpenAIBody):
    """A request for a chat's next message."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[ToolBody] = Field([])
    tool_choice: str | Choice | None = None
    logprobs: bool = False
    chat_template_kwargs: Object = Field({})
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    reasoning: Switch | None = None
    thinking: Switch | None = None
    enable_thinking: bool | None = None
    thinking_budget: Natural | None = None


def chat_request(body: ChatBody, settings: Settings) -> GenerationRequest:
    """Check a chat, and return its request."""
    for name in body.chat_template_kwargs:
        if name in RESERVED:
            raise invalid(
                f"chat_template_kwargs holds {name!r}, which no request may set.",
                "chat_template_kwargs",
            )
    args, budget = thinking(
        body.reasoning,
        body.thinking,
        on=body.enable_thinking,
        effort=body.reasoning_effort,
        budget=body.thinking_budget,
    )
    conversation = _conversation(body.messages, settings)
    tools, calls = Toolbox(body.tools).chosen(body.tool_choice)
    return openai_request(
        body,
        settings,
        prediction=None if body.prediction is None else body.prediction.text,
        default_length=settings.defaults.max_tokens,
        chat=conversation.chat(tools, {**args, **body.chat_template_kwargs}),
        calls=calls,
        thinking_budget=budget,
    )


def _conversation(messages: list[ChatMessage], settings: Settings) -> Conversation:
    conversation = Conversation(settings)
    for i, message in enumerate(messages):
        where, content = f"messages[{i}].content", message.content
        if message.role in ("system", "developer"):
            conversation.system(content, where)
        elif message.role == "user":
            conversation.user(content, where, message.name)
        elif message.role == "tool":
            conversation.result(message.tool_call_id, content, where, message.name)
        else:
            conversation.assistant([*content, *message.replayed()], where)
    return conversation


class ChatFace(OpenAIFace):
    """Chat Completions."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    fields = ("message", "delta")
    read = staticmethod(chat_request)
    _calls = 0  # number of calls in the text so far

    def open(self, prompt_tokens: int) -> Iterable[bytes]:
        """Send the role of the first text."""
        yield self._chunk(0, {"role": "assistant", "content": ""})

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """Send the reason for the end of a text, and begin the next one."""
        self._calls = 0
        yield self._chunk(choice, {}, self._reason(ending))
        if choice + 1 < self.request.count:
            yield self._chunk(choice + 1, {"role": "assistant", "content": ""})

    def _reason(self, ending: Ending) -> str:
        if ending.called and not ending.cut:
            return "tool_calls"
        return super()._reason(ending)

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not tokens:
            return None
        content = [
            {**_entry(token), "top_logprobs": [*map(_entry, token.top)]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _pieces(self, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
            if isinstance(part, Text):
                yield {"content": part.text}
            elif isinstance(part, Reasoning):
                yield {"reasoning": part.text, "reasoning_content": part.text}
            else:
                index, self._calls = self._calls, self._calls + 1
                named = {**_call(part), "index": index}
                named["function"] = {"name": part.name, "arguments": ""}
                yield {"tool_calls": [named]}
                arguments = {"arguments": part.arguments}
                yield {"tool_calls": [{"index": index, "function": arguments}]}

    def _whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        content = "".join(part.text for part in parts if isinstance(part, Text))
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [_call(part) for part in parts if isinstance(part, ToolCall)]
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = content if content or not calls else None
        if thought:
            message |= {"reasoning": thought, "reasoning_content": thought}
        return {**message, "tool_calls": calls} if calls else message


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _entry(one: Token) -> dict[str, Any]:
    """Return one token; its id is added, as in mlx-lm's server.

    If the token's text is a part of a character, the token's bytes are unknown.
    """
    known = BROKEN not in one.text
    return {
        "id": one.id,
        "token": one.text,
        "logprob": one.logprob,
        "bytes": list(one.text.encode("utf-8")) if known else None,
    }
