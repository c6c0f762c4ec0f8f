"""Chat Completions: chunks and messages."""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_speculation import __version__
from mlx_speculation.server.answer_parts import Part, Reasoning, Text, ToolCall
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.apis import usage as costs
from mlx_speculation.server.apis.base import Ending, Face, WholeText, event
from mlx_speculation.server.apis.chat_request import ChatBody, OpenAIBody, chat_request
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Token
from mlx_speculation.server.request import GenerationRequest

FINGERPRINT = f"mlx-speculation-{__version__}"


class OpenAIFace(Face):
    """Base of chats and completions."""

    prefix = ""
    kinds = fields = ("", "")  # of a whole answer, and of a chunk

    def __init__(
        self, body: OpenAIBody, request: GenerationRequest, settings: Settings
    ) -> None:
        super().__init__(request, settings)
        self._counts = bool(body.stream_options and body.stream_options.include_usage)
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

    def parts(
        self, choice: int, parts: Sequence[Part], tokens: Sequence[Token]
    ) -> Iterable[bytes]:
        """Send what a text has grown by."""
        self._unsent += tokens
        for piece in self._pieces(parts):
            yield self._chunk(choice, piece)

    def close(self, endings: Sequence[Ending]) -> Iterable[bytes]:
        """Send what all texts have cost, and the end."""
        if self._counts:
            packet = self._packet(self.kinds[1], [])
            yield event({**packet, "usage": self._usage(endings)})
        yield b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """End with an error."""
        yield event(error.body)

    def whole(self, texts: Sequence[WholeText]) -> dict[str, Any]:
        """Return all texts."""
        choices = []
        for index, text in enumerate(texts):
            piece, reason = self._whole(text.parts), self._reason(text.ending)
            one = {"index": index, self.fields[0]: piece, "finish_reason": reason}
            choices.append({**one, "logprobs": self._logprobs(text.tokens)})
        packet = self._packet(self.kinds[0], choices)
        return {**packet, "usage": self._usage([text.ending for text in texts])}

    def _whole(self, parts: Sequence[Part]) -> Any:
        """Return a text of an answer that is no stream."""
        raise NotImplementedError

    def _pieces(self, parts: Sequence[Part]) -> Iterable[Any]:
        """Return parts as the chunks have them."""
        raise NotImplementedError

    def _reason(self, ending: Ending) -> str:
        """Return why a text has ended."""
        return str(ending.result.finish_reason)

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """Return the probabilities of tokens; None: there are none."""
        raise NotImplementedError

    def _chunk(self, choice: int, piece: Any, reason: str | None = None) -> bytes:
        """Return a chunk, with the probabilities that have not been sent yet."""
        tokens, self._unsent = self._unsent, []
        one = {"index": choice, self.fields[1]: piece, "finish_reason": reason}
        choices = [{**one, "logprobs": self._logprobs(tokens)}]
        return event(self._packet(self.kinds[1], choices))

    def _packet(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        packet = {**self._head, "object": kind, "choices": choices}
        # Where usage was asked for, all chunks but the last have none.
        return {**packet, "usage": None} if self._counts and choices else packet

    def _usage(self, endings: Sequence[Ending]) -> dict[str, Any]:
        predicted = "prediction" in self.request.options
        return costs.usage(endings, self._draft, predicted=predicted)


class ChatFace(OpenAIFace):
    """Chat Completions."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    fields = ("message", "delta")

    def __init__(self, body: ChatBody, settings: Settings) -> None:
        super().__init__(body, chat_request(body, settings), settings)
        self._calls = 0

    def open(self, prompt_tokens: int) -> Iterable[bytes]:
        """Send the role of the first text."""
        yield self._chunk(0, {"role": "assistant", "content": ""})

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """Send why a text has ended, and begin the next one."""
        self._calls = 0
        yield self._chunk(choice, {}, self._reason(ending))
        if choice + 1 < self.request.count:
            yield self._chunk(choice + 1, {"role": "assistant", "content": ""})

    def _reason(self, ending: Ending) -> str:
        if ending.called and not ending.cut:
            return "tool_calls"
        return super()._reason(ending)

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        return costs.chat_logprobs(tokens) if tokens else None

    def _pieces(self, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
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

    def _whole(self, parts: Sequence[Part]) -> dict[str, Any]:
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
