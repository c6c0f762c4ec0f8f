"""Chat Completions: chunks and messages."""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_speculation import __version__
from mlx_speculation.server.answer_parts import Part, Reasoning, Text, ToolCall
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.apis import usage as costs
from mlx_speculation.server.apis.base import Ending, WholeText, event
from mlx_speculation.server.apis.chat_request import ChatBody, OpenAIBody, chat_request
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Token
from mlx_speculation.server.request import GenerationRequest

FINGERPRINT = f"mlx-speculation-{__version__}"


class OpenAIFace:
    """Base of chats and completions."""

    prefix, whole_kind, chunk_kind = "", "", ""

    def __init__(
        self, body: OpenAIBody, request: GenerationRequest, settings: Settings
    ) -> None:
        self.request = request
        self._counts = bool(body.stream_options and body.stream_options.include_usage)
        self._draft = request.draft or settings.draft
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": settings.names[0],
            "system_fingerprint": FINGERPRINT,
        }
        self._unsent: list[Token] = []

    def reading(self, tokens: int, of: int) -> Iterable[bytes]:
        """Send a comment, as mlx-lm's server does."""
        yield f": keepalive {tokens}/{of}\n\n".encode()

    def keep_alive(self) -> Iterable[bytes]:
        """Send a comment: clients take any object for a chunk."""
        yield b": keepalive\n\n"

    def close(self, endings: Sequence[Ending]) -> Iterable[bytes]:
        """Send what all texts have cost, and the end."""
        if self._counts:
            chunk = self._packet(self.chunk_kind, [])
            yield event({**chunk, "usage": self._usage(endings)})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """End with an error."""
        yield event(error.body)

    def whole(self, texts: Sequence[WholeText]) -> dict[str, Any]:
        """Return all texts."""
        choices = [self._choice(index, text) for index, text in enumerate(texts)]
        packet = self._packet(self.whole_kind, choices)
        return {**packet, "usage": self._usage([text.ending for text in texts])}

    def _choice(self, index: int, text: WholeText) -> dict[str, Any]:
        """Return one text of an answer that is no stream."""
        raise NotImplementedError

    def _packet(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        packet = {**self._head, "object": kind, "choices": choices}
        # Where usage was asked for, all chunks but the last have none.
        return {**packet, "usage": None} if self._counts and choices else packet

    def _usage(self, endings: Sequence[Ending]) -> dict[str, Any]:
        predicted = "prediction" in self.request.options
        return costs.total(
            [costs.usage(each, self._draft, predicted=predicted) for each in endings]
        )

    def _sent(self, tokens: Sequence[Token]) -> list[Token]:
        """Return the tokens that have not been sent yet, these included."""
        all_tokens, self._unsent = [*self._unsent, *tokens], []
        return all_tokens


class ChatFace(OpenAIFace):
    """Chat Completions."""

    prefix = "chatcmpl"
    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, settings: Settings) -> None:
        super().__init__(body, chat_request(body, settings), settings)
        self._calls = 0

    def open(self, prompt_tokens: int) -> Iterable[bytes]:
        """Send the role of the first text."""
        return self._role(0)

    def parts(
        self, choice: int, parts: Sequence[Part], tokens: Sequence[Token]
    ) -> Iterable[bytes]:
        """Send what a text has grown by."""
        if not parts:
            self._unsent += tokens
            return
        logprobs = self._logprobs(self._sent(tokens))
        for part in parts:
            for delta in self._deltas(part):
                yield self._chunk(choice, delta, logprobs=logprobs)
                logprobs = None

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """Send why a text has ended, and begin the next one."""
        logprobs, self._calls = self._logprobs(self._sent(())), 0
        yield self._chunk(choice, {}, _reason(ending), logprobs)
        if choice + 1 < self.request.count:
            yield from self._role(choice + 1)

    def _choice(self, index: int, text: WholeText) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(text.parts),
            "finish_reason": _reason(text.ending),
            "logprobs": self._logprobs(text.tokens),
        }

    def _role(self, choice: int) -> Iterator[bytes]:
        yield self._chunk(choice, {"role": "assistant", "content": ""})

    def _deltas(self, part: Part) -> Iterator[dict[str, Any]]:
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

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        one = {"index": choice, "delta": delta, "finish_reason": reason}
        return event(self._packet(self.chunk_kind, [{**one, "logprobs": logprobs}]))

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        return costs.chat_logprobs(tokens) if tokens else None


def _reason(ending: Ending) -> str:
    if ending.cut:
        return "length"
    return "tool_calls" if ending.called else str(ending.result.finish_reason)


def _message(parts: Sequence[Part]) -> dict[str, Any]:
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
