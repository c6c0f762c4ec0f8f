"""The Messages API: messages of blocks, and the events of their streams."""

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from mlx_speculation.server.answer_parts import Reasoning, Text, ToolCall
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.apis import usage as costs
from mlx_speculation.server.apis.base import Block, BlockFace, Ending, event
from mlx_speculation.server.apis.messages_request import MessagesBody, messages_request
from mlx_speculation.server.config import Settings

SIGNATURE = "mlx-speculation"  # clients drop thinking that has none


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
        """Begin a message; what of the prompt is cached is known in the end."""
        counts = {"input_tokens": prompt_tokens, "output_tokens": 0}
        usage = {**counts, "cache_read_input_tokens": 0}
        usage["cache_creation_input_tokens"] = 0
        ending = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        message = {**self._message, "content": [], **ending}
        yield _event("message_start", message=message)
        yield _event("ping")

    def keep_alive(self) -> Iterable[bytes]:
        """Send a ping, and in an open block a piece of nothing."""
        yield _event("ping")
        if self._open is not None:
            yield self._delta("")

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """End the message."""
        yield from self._closed()
        stopped, usage = _stopped(ending), self._usage(ending)
        ended = {**stopped, "usage": usage}
        self._answer = {**self._message, "content": self._blocks, **ended}
        yield _event("message_delta", delta=stopped, usage=usage)
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """End with an error."""
        yield event(error.messages_body, "error")

    def _usage(self, ending: Ending) -> dict[str, Any]:
        cached = ending.cached_tokens
        return {
            "input_tokens": ending.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": ending.tokens,
            "speculative": costs.speculative([ending], self._draft),
        }

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

    def _closed(self) -> Iterator[bytes]:
        self._spaces = ""
        if self._open is None:
            return
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
        self._open = None
        return stop

    def _sent(self, name: str, **fields: Any) -> bytes:
        return _event(name, index=len(self._blocks), **fields)


def _event(name: str, /, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _stopped(ending: Ending) -> dict[str, Any]:
    """Return why a message has ended."""
    reason = "end_turn"
    if ending.cut:
        room = "model_context_window_exceeded"
        reason = room if ending.out_of_room else "max_tokens"
    elif ending.called:
        reason = "tool_use"
    elif ending.stop_text is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": ending.stop_text}
