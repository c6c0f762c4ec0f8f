"""Requests and answers of the Messages API, as coding agents use it.

Fields that change from turn to turn, such as `cache_control`, are left out, so that the
tokens of earlier turns stay the same.
"""

import json
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from mlx_speculation.server.answer_parts import Part, Reasoning, Text, ToolCall
from mlx_speculation.server.api_errors import MESSAGES, ApiError
from mlx_speculation.server.apis.base import BlockFace, speculative
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job
from mlx_speculation.server.request.content import Content
from mlx_speculation.server.request.models import Object, RequestModel
from mlx_speculation.server.request.options import (
    Count,
    FormatConfig,
    GenerationRequest,
    Stops,
    Switch,
    TextOptions,
    generation,
    thinking,
)
from mlx_speculation.server.request.tools import Choice, ToolBody, Toolbox
from mlx_speculation.server.request.transcript import Conversation

# By kind of part: the type of its pieces, and the field that holds their text.
DELTAS = {
    Text: ("text", "text"),
    Reasoning: ("thinking", "thinking"),
    ToolCall: ("input_json", "partial_json"),
}
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

    def request(self, settings: Settings) -> GenerationRequest:
        """Check the fields, and return them as a `GenerationRequest`."""
        toolbox, choice = Toolbox(self.tools), self.tool_choice
        tools, calls = toolbox.chosen(choice)
        conversation = Conversation(settings, "\n", toolbox.deferred)
        conversation.add("system", self.system, "system")
        for i, message in enumerate(self.messages):
            conversation.add(message.role, message.content, f"messages[{i}].content")
        args, budget = thinking(self.thinking, effort=self.output_config.effort)
        return generation(
            self,
            settings,
            chat=conversation.chat(tools, args),
            calls=calls,
            form=self.output_config.format,
            parallel=not (choice and choice.disable_parallel_tool_use),
            thinking_budget=budget,
        )


class MessagesBody(CountBody):
    """A request for the next message."""

    lengths: ClassVar[Sequence[str]] = ("max_tokens",)

    max_tokens: Count | None = None
    stop: Stops | None = Field(None, alias="stop_sequences")


class MessagesFace(BlockFace):
    """The Messages API."""

    def __init__(self, body: MessagesBody, settings: Settings) -> None:
        super().__init__(body, settings)
        self._head: Object = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": settings.names[0],
            "content": self._blocks,
        }

    def open(self, choice: int, prompt_tokens: int) -> None:
        """Begin a message; `end_text` sends the number of cached prompt tokens."""
        ending = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head, **ending, "usage": _usage(prompt_tokens)}
        self._event("message_start", message=message)
        self._event("ping")

    def keep_alive(self) -> None:
        """Send a ping, and an empty piece of the open block if there is one."""
        self._event("ping")
        if self._open is not None:
            self._delta(self._open, "")

    def end_text(self, choice: int, job: Job) -> None:
        """End the message."""
        self._closed()
        stopped, result = _stopped(job), job.result
        usage = _usage(job.prompt_tokens, result.stats.reused, len(result.tokens))
        usage["speculative"] = speculative([result], self._draft)
        self.answer = {**self._head, **stopped, "usage": usage}
        self._event("message_delta", delta=stopped, usage=usage)
        self._event("message_stop")

    def failed(self, error: ApiError) -> None:
        """End with an error."""
        self._send(error.body_for(MESSAGES), "error")

    def _begin(self, part: Part) -> None:
        block = _block(part, "", signature="")
        self._of_block("content_block_start", content_block=block)

    def _delta(self, part: Part, text: str) -> None:
        kind, field = DELTAS[type(part)]
        delta = {"type": f"{kind}_delta", field: text}
        self._of_block("content_block_delta", delta=delta)

    def _ended(self, part: Part, status: str) -> None:
        if isinstance(part, Reasoning):
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            self._of_block("content_block_delta", delta=delta)
        self._of_block("content_block_stop")
        self._blocks.append(_block(part, self._text))

    def _of_block(self, name: str, **fields: Any) -> None:
        self._event(name, index=len(self._blocks), **fields)

    def _event(self, name: str, /, **fields: Any) -> None:
        self._send({"type": name, **fields}, name)


def _block(part: Part, text: str, signature: str = SIGNATURE) -> Object:
    match part:
        case Text():
            return {"type": "text", "text": text}
        case Reasoning():
            return {"type": "thinking", "thinking": text, "signature": signature}
        case ToolCall(name=name, id=id):
            given = json.loads(text or "{}")
            return {"type": "tool_use", "id": id, "name": name, "input": given}


def _usage(prompt: int, cached: int = 0, output: int = 0) -> Object:
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output,
    }


def _stopped(job: Job) -> Object:
    """Return the reason for the end of a message, and its stop text."""
    reason, most = "end_turn", job.request.options.get("max_tokens")
    if job.cut:
        reason = "max_tokens"
        if most is None or len(job.result.tokens) < most:
            reason = "model_context_window_exceeded"
    elif job.parser.calls:
        reason = "tool_use"
    elif job.stop_text is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": job.stop_text}
