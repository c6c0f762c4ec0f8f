"""Bodies of the Messages API, and what coding agents put into them.

cache_control    is passed over, wherever it stands: it moves from turn to turn
billing line     a system block of the client's own accounts, with values that change
                 from request to request: it is left out
deferred tools   stand outside of the tools that the model is shown, and are
                 described where a `tool_reference` names them: what was read of the
                 turns before stays as it was
"""

from typing import Annotated, Literal

from pydantic import Field

from mlx_speculation.server.api_errors import invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request import Chat, Conversation, GenerationRequest
from mlx_speculation.server.request import options as read
from mlx_speculation.server.request.content import Content
from mlx_speculation.server.request.models import RequestModel
from mlx_speculation.server.request.options import Count, Object, TextOptions
from mlx_speculation.server.request.tools import Choice, ToolBody, Toolbox


class Message(RequestModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Content = Field([])


class Thinking(RequestModel):
    """Whether the model thinks first, and for how long."""

    type: str
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class Format(RequestModel):
    """The form that the text has to have."""

    type: str
    json_schema: Object | None = Field(None, alias="schema")


class OutputConfig(RequestModel):
    """Effort, and the form of the text."""

    effort: str | None = None
    format: Format | None = None


class MessagesTool(ToolBody):
    """A tool, which without a type is a function."""

    type: str = "custom"


class CountBody(TextOptions):
    """A request to count the tokens of a prompt."""

    messages: list[Message] = Field(min_length=1)
    system: Content = Field([])
    tools: list[MessagesTool] = Field([])
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    """A request for the next message."""

    max_tokens: Count | None = None
    stop_sequences: list[str] = Field(default_factory=list)


def messages_request(body: CountBody, settings: Settings) -> GenerationRequest:
    """Check a request.

    Raises:
        ApiError: names the field that is wrong.
    """
    toolbox, choice = Toolbox(body.tools), body.tool_choice
    chosen = toolbox.chosen(choice)
    conversation = Conversation(settings, "\n", toolbox.deferred)
    conversation.system(body.system, "system")
    for i, message in enumerate(body.messages):
        add = getattr(conversation, message.role)
        add(message.content, f"messages[{i}].content")
    messages, images = conversation.messages()
    args, budget = _thinking(body)
    most, asked = settings.limits.max_tokens, getattr(body, "max_tokens", None)
    stops = read.stops(getattr(body, "stop_sequences", None), "stop_sequences")
    return read.generation(
        body,
        settings,
        {"stop": stops},
        # A client asks for what its own model has; it gets what there is.
        max_tokens=min(asked, most) if asked and most else asked or most or None,
        any_model=True,
        chat=Chat(
            messages=messages,
            tools=chosen.shown,
            deferred=tuple(toolbox.deferred),
            template_args=args,
            images=images,
        ),
        schema=_schema(body.output_config),
        calls=chosen.needed,
        most_calls=1 if choice and choice.disable_parallel_tool_use else None,
        thinking_budget=budget,
    )


def _thinking(body: CountBody) -> tuple[Object, int | None]:
    effort = None if body.output_config is None else body.output_config.effort
    if body.thinking is None:
        return read.thinking_args(None, effort), None
    on = body.thinking.type != "disabled"
    budget = body.thinking.budget_tokens if on else None
    return read.thinking_args(on, effort), budget or None


def _schema(given: OutputConfig | None) -> Object | None:
    if given is None or given.format is None or given.format.type == "text":
        return None
    if given.format.type != "json_schema" or given.format.json_schema is None:
        raise invalid(
            "output_config.format is no json_schema with a schema.",
            "output_config.format",
        )
    return read.checked_schema(given.format.json_schema, "output_config.format")
