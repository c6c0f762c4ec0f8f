"""Bodies of the Messages API, and what coding agents put into them.

cache_control    is passed over, wherever it stands: it moves from turn to turn
billing line     a system block of the client's own accounts, with values that change
                 from request to request: it is left out
deferred tools   stand outside of the tools that the model is shown, and are
                 described where a `tool_reference` names them: what was read of the
                 turns before stays as it was
"""

from typing import Literal

from pydantic import Field

from mlx_speculation.server.config import Settings
from mlx_speculation.server.request import Conversation, GenerationRequest
from mlx_speculation.server.request import options as read
from mlx_speculation.server.request.content import Content
from mlx_speculation.server.request.models import RequestModel
from mlx_speculation.server.request.options import Count, TextOptions
from mlx_speculation.server.request.tools import Choice, ToolBody, Toolbox


class Message(RequestModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Content = Field([])


class OutputConfig(RequestModel):
    """Effort, and the form of the text."""

    effort: str | None = None
    format: read.TextFormat | None = None


class CountBody(TextOptions):
    """A request to count the tokens of a prompt."""

    messages: list[Message] = Field(min_length=1)
    system: Content = Field([])
    tools: list[ToolBody] = Field([])
    tool_choice: Choice | None = None
    thinking: read.Switch | None = None
    output_config: OutputConfig = OutputConfig()


class MessagesBody(CountBody):
    """A request for the next message."""

    max_tokens: Count | None = None
    stop_sequences: list[str] = Field(default_factory=list)


def messages_request(body: CountBody, settings: Settings) -> GenerationRequest:
    """Check a request."""
    toolbox, choice, config = Toolbox(body.tools), body.tool_choice, body.output_config
    chosen = toolbox.chosen(choice)
    conversation = Conversation(settings, "\n", toolbox.deferred)
    conversation.system(body.system, "system")
    for i, message in enumerate(body.messages):
        add = getattr(conversation, message.role)
        add(message.content, f"messages[{i}].content")
    args, budget = read.thinking(body.thinking, effort=config.effort)
    most, wanted = settings.limits.max_tokens, getattr(body, "max_tokens", None)
    stops = read.stops(getattr(body, "stop_sequences", None), "stop_sequences")
    return read.generation(
        body,
        settings,
        {"stop": stops},
        # A client asks for what its own model has; it gets what there is.
        max_tokens=min(wanted, most) if wanted and most else wanted or most or None,
        any_model=True,
        chat=conversation.chat(chosen, args),
        schema=read.schema_of(config.format, "output_config.format"),
        calls=chosen.needed,
        most_calls=1 if choice and choice.disable_parallel_tool_use else None,
        thinking_budget=budget,
    )
