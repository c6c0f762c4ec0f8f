"""Bodies of Chat Completions, with the fields that agents add to OpenAI's.

Fields of messages that are not known are passed over: agents replay what they got, and
add their own. Fields of the body that are not known are refused: see `StrictModel`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from mlx_speculation.engine.options import StreamKeywords
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
from mlx_speculation.server.request.models import RequestModel, StrictModel
from mlx_speculation.server.request.options import Count, Object, SamplingOptions
from mlx_speculation.server.request.tools import Choice, ToolBody, Toolbox
from mlx_speculation.server.request.transcript import Arguments

NOT_OFFERED = {  # fields of OpenAI's and mlx-lm's, and what to do instead
    "adapters": "Start the server with --adapter-path.",
    "suffix": "Leave it out: a text is continued at its end alone.",
    "functions": "Name them in tools.",
    "function_call": "Choose with tool_choice.",
    "audio": "Leave it out: the answer is text.",
}
NO_EFFECT = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("verbosity", "cache_control", "moderation"),
        *("include_reasoning", "reasoning_format", "session_id", "provider", "usage"),
        *("cache_prompt", "parse_tool_calls", "web_search_options"),
    )
)
# Keywords of a chat template that are not the template's: a client's own template could
# run for ever.
RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message"),
        *("conversation", "documents", "max_length", "messages", "padding"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"),
        *("tokenizer_kwargs", "tools", "truncation"),
    )
)


class StreamOptions(StrictModel):
    """Options of a stream."""

    where: ClassVar[str] = "stream_options."
    no_effect: ClassVar[frozenset[str]] = frozenset(("include_obfuscation",))

    include_usage: bool = False


class OpenAIBody(StrictModel, SamplingOptions):
    """Fields that chats and completions share."""

    not_offered: ClassVar[dict[str, str]] = NOT_OFFERED
    no_effect: ClassVar[frozenset[str]] = NO_EFFECT

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Count = 1
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    stream_options: StreamOptions | None = None
    response_format: read.ResponseFormat | None = None
    parallel_tool_calls: bool = True


class Prediction(RequestModel):
    """A text that the answer may be like."""

    type: Literal["content"]
    content: Content


class CalledFunction(RequestModel):
    """The function of a tool call in the history, or its custom tool."""

    name: str
    arguments: Arguments = Field({})

    @classmethod
    def check_names(cls, values: Object) -> None:
        """Take the text of a custom tool as the argument "input"."""
        if "input" in values:
            values["arguments"] = {"input": str(values["input"])}


class ToolCallBody(RequestModel):
    """A tool call in the history."""

    id: Loose = ""
    function: CalledFunction = Field(
        validation_alias=AliasChoices("function", "custom")
    )


class ChatMessage(RequestModel):
    """One message; agents replay what they got, and add fields of their own."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field([])
    name: Loose = ""
    tool_call_id: Loose = ""
    tool_calls: list[ToolCallBody] = Field([])
    reasoning_content: Loose = ""
    reasoning: Loose = ""

    def replayed(self) -> Iterator[Block]:
        """Yield reasoning and calls as blocks."""
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
    top_logprobs: Annotated[int, Field(ge=-1, le=read.MOST_ALTERNATIVES)] | None = None
    chat_template_kwargs: Object = Field(default_factory=dict)
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    reasoning: read.Switch | None = None
    thinking: read.Switch | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None


def chat_request(body: ChatBody, settings: Settings) -> GenerationRequest:
    """Check a chat."""
    conversation = _conversation(body.messages, settings)
    tools = Toolbox(body.tools).chosen(body.tool_choice)
    args, budget = _thinking(body)
    options: StreamKeywords = {
        "logprobs": alternatives(body.logprobs, body.top_logprobs),
        "prediction": _predicted(body.prediction),
    }
    return openai_request(
        body,
        settings,
        options,
        max_tokens=max_tokens(body, settings) or None,
        chat=conversation.chat(tools, args),
        schema=read.schema_of(body.response_format, "response_format"),
        calls=tools.needed,
        most_calls=None if body.parallel_tool_calls else 1,
        thinking_budget=budget,
    )


def openai_request(
    body: OpenAIBody,
    settings: Settings,
    options: StreamKeywords,
    *,
    prompts: Sequence[str | list[int]] = (),
    **more: Any,  # further fields of the request
) -> GenerationRequest:
    """Return a request with the fields that chats and completions share."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is given without stream.", "stream_options")
    count = body.n * max(1, len(prompts))
    if count > settings.max_rows:
        raise invalid(
            f"{count} texts are asked for at once, and {settings.max_rows} may be. Ask "
            "for fewer, or start the server with a larger --max-rows.",
            "n" if body.n > 1 else "prompt",
        )
    options["stop"] = read.stops(body.stop)
    return read.generation(
        body, settings, options, prompts=tuple(prompts), count=body.n, **more
    )


def max_tokens(body: OpenAIBody, settings: Settings) -> int:
    """Return the number of tokens that is asked for, or the default; 0: none."""
    most = settings.limits.max_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        read.at_most(getattr(body, name), most, name, "max-tokens-limit")
    given = body.max_completion_tokens or body.max_tokens
    return given or settings.defaults.max_tokens


def alternatives(wanted: bool, top: int | None) -> int | None:
    """Return the number of alternatives that are wanted; None: nothing."""
    # -1 is mlx-lm's way of saying none.
    if top is not None and top > 0 and not wanted:
        raise invalid("top_logprobs is given without logprobs: true.", "top_logprobs")
    return max(top or 0, 0) if wanted else None


def _predicted(given: Prediction | None) -> str | None:
    if given is None:
        return None
    blocks = given.content
    return "".join(each.text for each in blocks if isinstance(each, TextBlock))


def _thinking(body: ChatBody) -> tuple[Object, int | None]:
    for name in body.chat_template_kwargs:
        if name in RESERVED:
            raise invalid(
                f"chat_template_kwargs holds {name!r}, which no request may set.",
                "chat_template_kwargs",
            )
    args, budget = read.thinking(
        body.reasoning,
        body.thinking,
        on=body.enable_thinking,
        effort=body.reasoning_effort,
        budget=body.thinking_budget,
    )
    return {**args, **body.chat_template_kwargs}, budget


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
