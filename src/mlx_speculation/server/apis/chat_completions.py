"""Chat Completions: request bodies, and answers as chunks or whole messages.

Unknown fields of messages are ignored: agents add fields to the answers that they send
back.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field
from transformers import PreTrainedTokenizerBase

from mlx_speculation.server.answer_parts import Part, Reasoning, Text, ToolCall
from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.apis.openai import CompletionFace, OpenAIBody
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job, Token
from mlx_speculation.server.request.content import (
    Called,
    Content,
    TextBlock,
    ThinkingBlock,
)
from mlx_speculation.server.request.models import Loose, Object, RequestModel
from mlx_speculation.server.request.options import (
    GenerationRequest,
    Natural,
    Switch,
    thinking,
)
from mlx_speculation.server.request.tools import Choice, ToolBody, Toolbox
from mlx_speculation.server.request.transcript import Conversation

BROKEN = "\N{REPLACEMENT CHARACTER}"
# Keywords of `apply_chat_template` that a request must not set: a client's own template
# could run for ever.
RENDER = signature(PreTrainedTokenizerBase.apply_chat_template)
RESERVED = {"messages", *RENDER.parameters}


class Prediction(RequestModel):
    """A text that the answer may resemble."""

    type: Literal["content"]
    content: Content


class ToolCallBody(RequestModel):
    """A tool call in the history."""

    id: Loose = ""
    function: Called = Field(validation_alias=AliasChoices("function", "custom"))


class ChatMessage(RequestModel):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field([])
    name: Loose = ""
    tool_call_id: Loose = ""
    tool_calls: list[ToolCallBody] = Field([])
    reasoning_content: Loose = ""
    reasoning: Loose = ""

    def add_to(self, conversation: Conversation, where: str) -> None:
        """Add this message; that of an assistant with its reasoning and its calls."""
        said = [*self.content]
        if self.role == "assistant":
            thought = self.reasoning_content or self.reasoning
            said.append(ThinkingBlock(thinking=thought))
            for i, each in enumerate(self.tool_calls):
                said.append(each.function.block(each.id or f"call_{i}"))
        name, call = self.name, self.tool_call_id
        conversation.add(self.role, said, where, name=name, call=call)


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

    def request(self, settings: Settings) -> GenerationRequest:
        """Check the fields, and return them as a `GenerationRequest`."""
        for name in self.chat_template_kwargs:
            if name in RESERVED:
                raise invalid(
                    f"chat_template_kwargs holds {name!r}, which no request may set.",
                    "chat_template_kwargs",
                )
        args, budget = thinking(
            self.reasoning,
            self.thinking,
            on=self.enable_thinking,
            effort=self.reasoning_effort,
            budget=self.thinking_budget,
        )
        conversation = Conversation(settings)
        for i, message in enumerate(self.messages):
            message.add_to(conversation, f"messages[{i}].content")
        tools, calls = Toolbox(self.tools).chosen(self.tool_choice)
        likely = [] if self.prediction is None else self.prediction.content
        texts = [block.text for block in likely if isinstance(block, TextBlock)]
        return self.generation(
            settings,
            prediction="".join(texts) if self.prediction else None,
            default_length=settings.defaults.max_tokens,
            chat=conversation.chat(tools, {**args, **self.chat_template_kwargs}),
            calls=calls,
            thinking_budget=budget,
        )


class ChatFace(CompletionFace):
    """Chat Completions."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    fields = ("message", "delta")
    last: ClassVar[Any] = {}

    def open(self, choice: int, prompt_tokens: int) -> None:
        """Send the role."""
        self._chunk(choice, {"role": "assistant", "content": ""})

    def _reason(self, job: Job) -> str:
        return (
            "tool_calls" if job.parser.calls and not job.cut else super()._reason(job)
        )

    def _logprobs(self, tokens: Sequence[Token]) -> Object:
        content = [
            {**_entry(token), "top_logprobs": [*map(_entry, token.top)]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _piece(self, choice: int, part: Part) -> None:
        if isinstance(part, Text):
            self._chunk(choice, {"content": part.text})
        elif isinstance(part, Reasoning):
            thought = part.text
            self._chunk(choice, {"reasoning": thought, "reasoning_content": thought})
        else:
            place = {"index": len(self._calls())}
            first = {**_call(part), "function": {"name": part.name, "arguments": ""}}
            for call in first, {"function": {"arguments": part.arguments}}:
                self._chunk(choice, {"tool_calls": [{**place, **call}]})

    def _calls(self) -> list[Object]:
        return [_call(part) for part in self._parts if isinstance(part, ToolCall)]

    def _whole(self) -> Object:
        content, thought, calls = self._said(Text), self._said(Reasoning), self._calls()
        message: Object = {"role": "assistant"}
        message["content"] = content if content or not calls else None
        if thought:
            message |= {"reasoning": thought, "reasoning_content": thought}
        return {**message, "tool_calls": calls} if calls else message


def _call(call: ToolCall) -> Object:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _entry(one: Token) -> Object:
    known = BROKEN not in one.text  # else the text is a part of a character
    return {
        "id": one.id,
        "token": one.text,
        "logprob": one.logprob,
        "bytes": list(one.text.encode("utf-8")) if known else None,
    }
