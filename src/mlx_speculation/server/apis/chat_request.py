"""Bodies of Chat Completions, and what of them an agent may send that OpenAI does not.

Fields of messages that are not known are passed over: agents replay what they got, and
add their own. Fields of the body that are not known are refused: see `StrictModel`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request import Call, Chat, Conversation, GenerationRequest
from mlx_speculation.server.request import options as read
from mlx_speculation.server.request.images import image_part
from mlx_speculation.server.request.models import RequestModel, StrictModel, short
from mlx_speculation.server.request.options import Count, Object, SamplingOptions
from mlx_speculation.server.request.tools import Tools, chosen_tools, function_tool
from mlx_speculation.server.request.transcript import (
    IMAGE_NOTE,
    Content,
    read_arguments,
)

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
        *("prompt_cache_key", "prompt_cache_retention", "verbosity", "cache_control"),
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
    """What a stream has beside its text."""

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


class Switch(RequestModel):
    """Thinking, as Anthropic's, OpenRouter's and other interfaces switch it."""

    type: str | None = None
    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None


class Prediction(RequestModel):
    """A text that the answer may be like."""

    type: Literal["content"]
    content: str | list[Object]


class ChatBody(OpenAIBody):
    """A request for a chat's next message."""

    messages: list[Object] = Field(min_length=1)
    tools: list[Object] = Field(default_factory=list)
    tool_choice: str | Object | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=-1, le=read.MOST_ALTERNATIVES)] | None = None
    chat_template_kwargs: Object = Field(default_factory=dict)
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    reasoning: Switch | None = None
    thinking: Switch | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None


def chat_request(body: ChatBody, settings: Settings) -> GenerationRequest:
    """Check a chat.

    Raises:
        ApiError: names the field that is wrong.
    """
    messages, images = _conversation(body.messages, settings).messages()
    tools = _tools(body)
    schema = read.schema_of(body.response_format)
    read.without_both(schema, tools.needed)
    args, budget = _thinking(body)
    return GenerationRequest(
        chat=Chat(
            messages=messages, tools=tools.shown, template_args=args, images=images
        ),
        logprobs=alternatives(body.logprobs, body.top_logprobs),
        schema=schema,
        calls=tools.needed,
        most_calls=None if body.parallel_tool_calls else 1,
        thinking_budget=budget,
        prediction=_predicted(body.prediction),
        max_tokens=max_tokens(body, settings) or settings.defaults.max_tokens or None,
        **shared(body, settings, 1),
    )


def shared(body: OpenAIBody, settings: Settings, prompts: int) -> Object:
    """Return the fields that chats and completions share; `prompts` are continued."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is given without stream.", "stream_options")
    read.checked_model(body.model, settings)
    if body.n * prompts > settings.max_rows:
        raise invalid(
            f"{body.n * prompts} texts are asked for at once, and {settings.max_rows} "
            "may be. Ask for fewer, or start the server with a larger --max-rows.",
            "n" if body.n > 1 else "prompt",
        )
    return {
        "count": body.n,
        "stream": body.stream,
        "sampling": read.sampling(body, settings),
        "stop": read.stops(body.stop),
        **read.drafts(body, settings),
    }


def max_tokens(body: OpenAIBody, settings: Settings) -> int | None:
    """Return how many tokens are asked for; None: it is not said."""
    most = settings.limits.max_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        read.at_most(getattr(body, name), most, name, "max-tokens-limit")
    return body.max_completion_tokens or body.max_tokens


def alternatives(wanted: bool, top: int | None) -> int | None:
    """Return the number of alternatives that are wanted; None: nothing."""
    # -1 is mlx-lm's way of saying none.
    if top is not None and top > 0 and not wanted:
        raise invalid("top_logprobs is given without logprobs: true.", "top_logprobs")
    return max(top or 0, 0) if wanted else None


def _predicted(given: Prediction | None) -> str | None:
    if given is None:
        return None
    if isinstance(given.content, str):
        return given.content
    return "".join(str(part.get("text", "")) for part in given.content)


def _thinking(body: ChatBody) -> tuple[Object, int | None]:
    """Return keywords for the template, and the budget, of all switches there are."""
    effort, on = body.reasoning_effort, body.enable_thinking
    budget = body.thinking_budget
    for switch in (body.reasoning, body.thinking):
        if switch is None:
            continue
        effort = switch.effort or effort
        on = switch.enabled if on is None else on
        if on is None and switch.type is not None:
            on = switch.type != "disabled"
        budget = next(
            (
                value
                for value in (budget, switch.budget_tokens, switch.max_tokens)
                if value is not None
            ),
            None,
        )
    if on is None and (effort == "none" or budget == 0):
        on = False
    for name in body.chat_template_kwargs:
        if name in RESERVED:
            raise invalid(
                f"chat_template_kwargs holds {name!r}, which no request may set.",
                "chat_template_kwargs",
            )
    args = {**read.thinking_args(on, effort), **body.chat_template_kwargs}
    return args, budget or None


def _tools(body: ChatBody) -> Tools:
    tools = []
    for i, tool in enumerate(body.tools):
        where = f"tools[{i}]"
        custom = tool.get("custom") if tool.get("type") == "custom" else None
        given = tool.get("function") if custom is None else custom
        tools.append(function_tool(given, where))
    choice: Any = body.tool_choice
    if isinstance(choice, dict):
        kind = choice.get("type")
        inner = choice.get(kind) if kind in ("function", "custom") else None
        name = inner.get("name") if isinstance(inner, dict) else None
        choice = (name,) if isinstance(name, str) else short(choice)
    return chosen_tools(tools, choice)


def _conversation(messages: list[Object], settings: Settings) -> Conversation:
    conversation, images = Conversation(), 0
    for i, message in enumerate(messages):
        where, role = f"messages[{i}]", message.get("role")
        content = _content(message.get("content"), where, settings, role, images)
        if isinstance(content, list):
            images += sum(part["type"] == "image" for part in content)
        name = message.get("name")
        name = name if isinstance(name, str) else None
        if role in ("system", "developer"):
            conversation.system(_text(content))
        elif role == "user":
            conversation.user(content, name)
        elif role == "assistant":
            thought = message.get("reasoning_content") or message.get("reasoning")
            conversation.assistant(
                _text(content),
                reasoning=thought if isinstance(thought, str) else "",
                calls=_calls(message.get("tool_calls"), where),
            )
        elif role == "tool":
            conversation.result(str(message.get("tool_call_id")), content, name)
        else:
            known = "system, developer, user, assistant or tool"
            raise invalid(
                f"{where}.role is {short(role)}, and {known} is needed.",
                f"{where}.role",
            )
    return conversation


def _content(
    given: Any, where: str, settings: Settings, role: Any, images: int
) -> Content:
    """Return a content: a text, or its parts."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise invalid(f"{where}.content is no text.", f"{where}.content")
    parts = []
    for i, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind == "image_url":
            if role == "tool" and not settings.reads_images:
                parts.append({"type": "text", "text": IMAGE_NOTE})
                continue
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            place = f"{where}.content[{i}]"
            parts.append(image_part(url, place, settings, images + len(parts)))
        elif kind == "text" and isinstance(text, str):
            parts.append({"type": "text", "text": text})
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            parts.append({"type": "text", "text": part["refusal"]})
        else:
            raise invalid(
                f"{where}.content holds a part that is no text and no image. Audio and "
                "files are not taken.",
                f"{where}.content",
            )
    return parts


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _calls(given: Any, where: str) -> list[Call]:
    """Return the calls of a message of the model's."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise invalid(f"{where}.tool_calls is no list.", f"{where}.tool_calls")
    calls = []
    for i, one in enumerate(given):
        place = f"{where}.tool_calls[{i}]"
        function = one.get("function") if isinstance(one, dict) else None
        custom = one.get("custom") if isinstance(one, dict) else None
        if function is None and isinstance(custom, dict):
            value = {"input": str(custom.get("input", ""))}
            function = {"name": custom.get("name"), "arguments": value}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{place} is no call of a function.", place)
        field = f"{place}.function.arguments"
        arguments = read_arguments(function.get("arguments"), field)
        calls.append(
            Call(str(one.get("id") or f"call_{i}"), function["name"], arguments)
        )
    return calls
