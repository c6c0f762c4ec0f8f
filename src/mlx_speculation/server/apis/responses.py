"""The Responses API: items, and the events of their streams.

Each item has one id in all its events. Events are numbered from 0 on.
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_speculation.server.answer_parts import Part, Text, ToolCall, joined
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.apis import usage as costs
from mlx_speculation.server.apis.base import Ending, WholeText, event
from mlx_speculation.server.apis.responses_request import (
    ResponsesBody,
    responses_request,
)
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Token
from mlx_speculation.server.request.tools import Kind

Item = dict[str, Any]


class ResponsesFace:
    """The Responses API."""

    def __init__(self, body: ResponsesBody, settings: Settings) -> None:
        made = responses_request(body, settings)
        self.request, self._kinds = made.request, made.kinds
        self._draft = self.request.draft or settings.draft
        self._head = _head(body, self.request.sampling, settings)
        self._number = 0  # of the next event
        self._items: list[Item] = []  # that are complete
        self._open: Item | None = None
        self._text = ""  # of the open item
        self._spaces = ""  # that a message may begin with

    def open(self, prompt_tokens: int) -> Iterable[bytes]:
        """Begin a response."""
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def reading(self, tokens: int, of: int) -> Iterable[bytes]:
        """Send nothing: the keep-alives tell that it goes on."""
        return ()

    def keep_alive(self) -> Iterable[bytes]:
        """Say again that it is in progress: clients pass over comments."""
        yield self._event("in_progress", response=self._response("in_progress"))

    def parts(
        self, choice: int, parts: Sequence[Part], tokens: Sequence[Token]
    ) -> Iterable[bytes]:
        """Send what the items have grown by."""
        for part in parts:
            if isinstance(part, ToolCall):
                yield from self._closed()
                yield from self._call(part)
                continue
            kind = "message" if isinstance(part, Text) else "reasoning"
            if self._open is None or self._open["type"] != kind:
                if isinstance(part, Text):
                    part = Text(self._spaces + part.text)
                    self._spaces = "" if part.text.strip() else part.text
                    if self._spaces:
                        continue
                    part = _first_text(part, self._open is None and not self._items)
                yield from self._closed()
                yield from self._opened(kind)
            yield self._delta(part.text)

    def end_text(self, choice: int, ending: Ending) -> Iterable[bytes]:
        """End the response."""
        yield from self._closed(complete=not ending.cut)
        status = "incomplete" if ending.cut else "completed"
        response = self._response(status, ending)
        yield self._event(status, response=response)

    def close(self, endings: Sequence[Ending]) -> Iterable[bytes]:
        """End the stream, which the last event has done."""
        return ()

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """End with an error, in the words that clients go by."""
        code = error.code if error.status < 500 else "server_error"
        response = self._response("failed")
        response["error"] = {"code": code or error.type, "message": error.message}
        yield self._event("failed", response=response)

    def whole(self, texts: Sequence[WholeText]) -> dict[str, Any]:
        """Return the response."""
        (text,) = texts
        for part in joined(text.parts):
            if isinstance(part, ToolCall):
                self._items.append(self._call_item(part))
                continue
            if isinstance(part, Text):
                if not part.text.strip():
                    continue
                part = _first_text(part, not self._items)
            kind = "message" if isinstance(part, Text) else "reasoning"
            item = _item(kind)
            _completed(item, part.text)
            self._items.append(item)
        status = "completed"
        if text.ending.cut:
            status = "incomplete"
            if self._items and "call" not in self._items[-1]["type"]:
                self._items[-1]["status"] = status
        return self._response(status, text.ending)

    def _response(self, status: str, ending: Ending | None = None) -> dict[str, Any]:
        """Return the response as it is now."""
        response = {**self._head, "status": status, "output": [*self._items]}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if ending is not None:
            response["usage"] = self._usage(ending)
            response["completed_at"] = int(time.time())
        return response

    def _usage(self, ending: Ending) -> dict[str, Any]:
        details = {"cached_tokens": ending.cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": ending.prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": ending.tokens,
            "output_tokens_details": {"reasoning_tokens": ending.reasoning_tokens},
            "total_tokens": ending.prompt_tokens + ending.tokens,
            "speculative": costs.speculative(ending.result, self._draft),
        }

    def _opened(self, kind: str) -> Iterator[bytes]:
        self._open, self._text = _item(kind), ""
        item = {**self._open, "content": [], "status": "in_progress"}
        yield self._of_item("output_item.added", item=item)
        if kind == "message":
            yield self._of_part("content_part.added", part=_output_text(""))

    def _delta(self, text: str) -> bytes:
        assert self._open is not None
        self._text += text
        if self._open["type"] == "message":
            return self._of_part("output_text.delta", delta=text, logprobs=[])
        return self._of_part("reasoning_text.delta", delta=text)

    def _closed(self, *, complete: bool = True) -> Iterator[bytes]:
        """Complete the open item, if there is one."""
        self._spaces = ""
        if self._open is None:
            return
        item, text = self._open, self._text
        if item["type"] == "message":
            yield self._of_part("output_text.done", text=text, logprobs=[])
            yield self._of_part("content_part.done", part=_output_text(text))
        else:
            yield self._of_part("reasoning_text.done", text=text)
        _completed(item, text)
        if not complete:
            item["status"] = "incomplete"
        yield self._of_item("output_item.done", item=item)
        self._items.append(item)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        item = self._call_item(call)
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        empty = {**item, field: "", "status": "in_progress"}
        yield self._of_item("output_item.added", item=empty)
        name = "custom_tool_call_input"
        if field == "arguments":
            name = "function_call_arguments"
        place = {"item_id": item["id"], "output_index": len(self._items)}
        value = item[field]
        yield self._event(f"{name}.delta", **place, delta=value)
        done = {field: value}
        if field == "arguments":
            done["name"] = item["name"]
        yield self._event(f"{name}.done", **place, **done)
        yield self._of_item("output_item.done", item=item)
        self._items.append(item)

    def _call_item(self, call: ToolCall) -> Item:
        """Return a call under the names that the client has given its tool."""
        kind = self._kinds.get(call.name, Kind(call.name))
        item = {"status": "completed", "call_id": call.id, "name": kind.name}
        if kind.namespace is not None:
            item["namespace"] = kind.namespace
        if not kind.custom:
            made = {"id": _id("fc"), "type": "function_call"}
            return {**made, **item, "arguments": call.arguments}
        arguments = json.loads(call.arguments)
        text = arguments.get("input", call.arguments)
        shown = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        return {"id": _id("ctc"), "type": "custom_tool_call", **item, "input": shown}

    def _of_part(self, name: str, /, **fields: Any) -> bytes:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items)}
        return self._event(name, **place, content_index=0, **fields)

    def _of_item(self, name: str, /, **fields: Any) -> bytes:
        return self._event(name, output_index=len(self._items), **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _head(
    body: ResponsesBody, sampling: dict[str, Any], settings: Settings
) -> dict[str, Any]:
    """Return what a response says in all its states."""
    form = None if body.text is None else body.text.format
    shown = {"type": "text"} if form is None else _without_none(form)
    effort = None if body.reasoning is None else body.reasoning.effort
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": settings.names[0],
        "error": None,
        "incomplete_details": None,
        **body.echo,
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "text": {"format": shown},
        "truncation": "disabled",
        "usage": None,
    }


def _without_none(form: Any) -> dict[str, Any]:
    shown: dict[str, Any] = form.model_dump(by_alias=True, exclude_none=True)
    return {"name": "schema", **shown} if shown["type"] == "json_schema" else shown


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _item(kind: str) -> Item:
    if kind == "message":
        item: Item = {"id": _id("msg"), "type": kind, "role": "assistant"}
    else:
        item = {"id": _id("rs"), "type": kind, "summary": [], "encrypted_content": None}
    return {**item, "status": "completed", "content": []}


def _completed(item: Item, text: str) -> None:
    part: Item = {"type": "reasoning_text", "text": text}
    item["content"] = [_output_text(text) if item["type"] == "message" else part]


def _output_text(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _first_text(part: Text, first: bool) -> Text:
    """Return the beginning of a message, which behind other items has no line feeds."""
    return part if first else Text(part.text.lstrip("\n"))
