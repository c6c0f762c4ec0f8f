"""The Messages API: messages of blocks, and the events of their streams.

One block is open at a time. Text of nothing but white space between blocks is no block.
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_speculation.server.answer_parts import Part, Reasoning, Text, ToolCall, joined
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.apis import usage as costs
from mlx_speculation.server.apis.base import Ending, WholeText, event
from mlx_speculation.server.apis.messages_request import MessagesBody, messages_request
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Token

SIGNATURE = "mlx-speculation"  # clients drop thinking that has none


class MessagesFace:
    """The Messages API."""

    def __init__(self, body: MessagesBody, settings: Settings) -> None:
        self.request = messages_request(body, settings)
        self._draft = self.request.draft or settings.draft
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": settings.names[0],
        }
        self._index = 0  # of the open block, or of the next one
        self._open: type[Text] | type[Reasoning] | None = None
        self._spaces = ""  # that a text block may begin with

    def open(self, prompt_tokens: int) -> Iterable[bytes]:
        """Begin a message; what of the prompt is cached is known in the end."""
        counts = {"input_tokens": prompt_tokens, "output_tokens": 0}
        usage = {**counts, "cache_read_input_tokens": 0}
        usage["cache_creation_input_tokens"] = 0
        ending = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        message = {**self._message, "content": [], **ending}
        yield _event("message_start", message=message)
        yield _event("ping")

    def reading(self, tokens: int, of: int) -> Iterable[bytes]:
        """Send nothing: the pings tell that it goes on."""
        return ()

    def keep_alive(self) -> Iterable[bytes]:
        """Send a ping, and in an open block a piece of nothing."""
        yield _event("ping")
        if self._open is not None:
            yield self._delta(self._open(""))

    def parts(
        self, choice: int, parts: Sequence[Part], tokens: Sequence[Token]
    ) -> Iterable[bytes]:
        """Send what the text has grown by."""
        for part in parts:
            if isinstance(part, ToolCall):
                yield from self._call(part)
                continue
            if isinstance(part, Text) and self._open is not Text:
                part = Text(self._spaces + part.text)
                self._spaces = "" if part.text.strip() else part.text
                if self._spaces:
                    continue
                if self._index or self._open is not None:
                    part = Text(part.text.lstrip("\n"))
            yield from self._grown(part)

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """End the message."""
        yield from self._closed()
        delta = _stopped(ending)
        yield _event("message_delta", delta=delta, usage=self._usage(ending))
        yield _event("message_stop")

    def close(self, endings: Sequence[Ending]) -> Iterable[bytes]:
        """End the stream, which the last event has done."""
        return ()

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """End with an error."""
        yield event(error.messages_body, "error")

    def whole(self, texts: Sequence[WholeText]) -> dict[str, Any]:
        """Return the message."""
        (text,) = texts
        content: list[dict[str, Any]] = []
        for part in joined(text.parts):
            if isinstance(part, ToolCall):
                block = {**_block(part), "input": json.loads(part.arguments)}
                content.append(block)
            elif isinstance(part, Reasoning):
                block = {"type": "thinking", "thinking": part.text}
                content.append({**block, "signature": SIGNATURE})
            elif part.text.strip():
                shown = part.text.lstrip("\n") if content else part.text
                content.append({"type": "text", "text": shown})
        usage = self._usage(text.ending)
        stopped = _stopped(text.ending)
        return {**self._message, "content": content, **stopped, "usage": usage}

    def _usage(self, ending: Ending) -> dict[str, Any]:
        cached = ending.cached_tokens
        return {
            "input_tokens": ending.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": ending.tokens,
            "speculative": costs.speculative(ending.result, self._draft),
        }

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        yield from self._closed()
        block = {**_block(call), "input": {}}
        yield self._sent("content_block_start", content_block=block)
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield self._sent("content_block_delta", delta=delta)
        yield self._sent("content_block_stop")
        self._index += 1

    def _grown(self, part: Text | Reasoning) -> Iterator[bytes]:
        if self._open is not type(part):
            yield from self._closed()
            self._open = type(part)
            block: dict[str, Any] = {"type": "text", "text": ""}
            if isinstance(part, Reasoning):
                block = {"type": "thinking", "thinking": "", "signature": ""}
            yield self._sent("content_block_start", content_block=block)
        yield self._delta(part)

    def _delta(self, part: Text | Reasoning) -> bytes:
        delta = {"type": "text_delta", "text": part.text}
        if isinstance(part, Reasoning):
            delta = {"type": "thinking_delta", "thinking": part.text}
        return self._sent("content_block_delta", delta=delta)

    def _closed(self) -> Iterator[bytes]:
        """Close the open block, if there is one."""
        self._spaces = ""
        if self._open is None:
            return
        if self._open is Reasoning:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield self._sent("content_block_delta", delta=delta)
        yield self._sent("content_block_stop")
        self._open = None
        self._index += 1

    def _sent(self, name: str, **fields: Any) -> bytes:
        return _event(name, index=self._index, **fields)


def _event(name: str, /, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _block(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


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
