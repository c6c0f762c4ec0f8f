"""The Messages API: bodies as coding agents send them, blocks and events.

cache_control    is ignored everywhere, since clients move it from turn to turn
billing line     a system block for the client's billing; it is left out, since its
                 values change with every request
deferred tools   are not in the list of tools for the model, but described where a
                 `tool_reference` names them, so that the tokens of earlier turns stay
                 the same
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from mlx_speculation.server.answer_parts import Reasoning, Text, ToolCall
from mlx_speculation.server.api_errors import MESSAGES, ApiError
from mlx_speculation.server.apis.base import (
    Block,
    BlockFace,
    Ending,
    event,
    speculative,
)
from mlx_speculation.server.config import Settings
from mlx_speculation.server.request.content import Content
from mlx_speculation.server.request.models import RequestModel
from mlx_speculation.server.request.options import (
    Count,
    FormatConfig,
    Stops,
    Switch,
    TextOptions,
    generation,
    thinking,
)
from mlx_speculation.server.request.request import GenerationRequest
from mlx_speculation.server.request.tools import Choice, ToolBody, Toolbox
from mlx_speculation.server.request.transcript import Conversation

SIGNATURE = "mlx-speculation"  # clients drop thinking without a signature


class Message(RequestModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Content = Field([])


class CountBody(TextOptions):
    """A request to count the tokens of a prompt."""

    any_model: ClassVar[bool] = True

    messages: list[Message] = Field(min_length=1)
    system: Content = Field([])
    tools: list[ToolBody] = Field([])
    tool_choice: Choice | None = None
    thinking: Switch | None = None
    output_config: FormatConfig = FormatConfig()


class MessagesBody(CountBody):
    """A request for the next message."""

    lengths: ClassVar[Sequence[str]] = ("max_tokens",)

    max_tokens: Count | None = None
    stop: Stops | None = Field(None, alias="stop_sequences")


def messages_request(body: CountBody, settings: Settings) -> GenerationRequest:
    """Check a request, and return it in the common form."""
    toolbox, choice, config = Toolbox(body.tools), body.tool_choice, body.output_config
    tools, calls = toolbox.chosen(choice)
    conversation = Conversation(settings, "\n", toolbox.deferred)
    conversation.system(body.system, "system")
    for i, message in enumerate(body.messages):
        add = getattr(conversation, message.role)
        add(message.content, f"messages[{i}].content")
    args, budget = thinking(body.thinking, effort=config.effort)
    return generation(
        body,
        settings,
        chat=conversation.chat(tools, args),
        calls=calls,
        form=config.format,
        parallel=not (choice and choice.disable_parallel_tool_use),
        thinking_budget=budget,
    )


class MessagesFace(BlockFace):
    """The Messages API."""

    def __init__(self, body: MessagesBody, settings: Settings) -> None:
        super().__init__(messages_request(body, settings), settings)
        self._message: Block = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": settings.names[0],
        }

    def open(self, prompt_tokens: int) -> Iterable[bytes]:
        """Begin a message; `end_text` sends the number of cached prompt tokens."""
        ending = {"stop_reason": None, "stop_sequence": None}
        usage = {"usage": _usage(prompt_tokens)}
        message = {**self._message, "content": [], **ending, **usage}
        yield _event("message_start", message=message)
        yield _event("ping")

    def keep_alive(self) -> Iterable[bytes]:
        """Send a ping, and an empty piece of the open block if there is one."""
        yield _event("ping")
        if self._open is not None:
            yield self._delta("")

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """End the message."""
        yield from self._closed()
        stopped = _stopped(ending)
        usage = _usage(ending.prompt_tokens, ending.cached_tokens, ending.tokens)
        usage["speculative"] = speculative([ending], self._draft)
        ended = {**stopped, "usage": usage}
        self._answer = {**self._message, "content": self._blocks, **ended}
        yield _event("message_delta", delta=stopped, usage=usage)
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """End with an error."""
        yield event(error.body_for(MESSAGES), "error")

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        yield self._sent("content_block_start", content_block={**block, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield self._sent("content_block_delta", delta=delta)
        yield self._stop({**block, "input": json.loads(call.arguments)})

    def _begin(self) -> Iterator[bytes]:
        yield self._sent("content_block_start", content_block=self._block("", ""))

    def _delta(self, text: str) -> bytes:
        name = self._name
        delta = {"type": f"{name}_delta", name: text}
        return self._sent("content_block_delta", delta=delta)

    def _ended(self, status: str) -> Iterator[bytes]:
        if self._open is Reasoning:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield self._sent("content_block_delta", delta=delta)
        yield self._stop(self._block(self._text, SIGNATURE))

    @property
    def _name(self) -> str:
        return "text" if self._open is Text else "thinking"

    def _block(self, text: str, signature: str) -> Block:
        block = {"type": self._name, self._name: text}
        return block if self._open is Text else {**block, "signature": signature}

    def _stop(self, block: Block) -> bytes:
        stop = self._sent("content_block_stop")
        self._blocks.append(block)
        return stop

    def _sent(self, name: str, **fields: Any) -> bytes:
        return _event(name, index=len(self._blocks), **fields)


def _event(name: str, /, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _usage(prompt: int, cached: int = 0, output: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output,
    }


def _stopped(ending: Ending) -> dict[str, Any]:
    """Return the reason for the end of a message, and its stop text."""
    reason = "end_turn"
    if ending.cut:
        room = "model_context_window_exceeded"
        reason = room if ending.out_of_room else "max_tokens"
    elif ending.called:
        reason = "tool_use"
    elif ending.stop_text is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": ending.stop_text}
