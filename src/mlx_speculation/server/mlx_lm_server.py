"""What of mlx-lm's own server is run with another engine: three classes, narrowed.

    Provider        holds the target that somebody else has loaded
    EngineThread    one thread in which everything of mlx happens
    ChatHandler     routes, chat templates, server-sent events

mlx-lm's server renders chats and forms packets of the answers. Here it does not load,
choose tokens, keep caches, or read tool calls (`answer_parts.py`). This module is
imported by name only, since it imports all of mlx-lm.
"""

import atexit
import io
import json
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import (
    APIHandler,
    CompletionRequest,
    ModelProvider,
    ResponseGenerator,
)

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.server.answer_parts import (
    AnswerParser,
    Marks,
    Parts,
    read_calls,
)
from mlx_speculation.server.job import Piece

__all__ = [
    "ChatHandler",
    "CompletionRequest",
    "EngineThread",
    "Provider",
    "Refused",
    "options_of",
]

POLL_SECONDS = 0.01
EXIT_SECONDS = 5.0  # until the thread of a program that ends has gone


class Refused(Exception):  # noqa: N818  it is no error, but what mlx-lm's server says
    """mlx-lm's server has refused a request; the message is its own."""


def options_of(
    *, allowed_origins: list[str], chat_template_args: dict[str, Any]
) -> Namespace:
    """Return what mlx-lm's server reads of its command line.

    The options of sampling are those that it checks and hands on; here nobody takes
    them from there.
    """
    return Namespace(
        model=None,
        adapter_path=None,
        draft_model=None,
        pipeline=False,
        trust_remote_code=False,
        chat_template="",
        use_default_chat_template=False,
        allowed_origins=allowed_origins,
        chat_template_args=chat_template_args,
        num_draft_tokens=0,
        max_tokens=1,
        temp=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
    )


class Provider(ModelProvider):
    """The target and its tokenizer, for mlx-lm's server.

    Raises:
        InvalidRequestError: the process is one of several of `mx.distributed`.
    """

    model: Any
    tokenizer: Any
    model_key: Any

    def __init__(self, options: Namespace) -> None:
        group = mx.distributed.init()
        if group.size() > 1:
            raise InvalidRequestError(
                f"The server runs in 1 process, and this is rank {group.rank()} of "
                f"{group.size()}. Start it without mlx.launch."
            )
        super().__init__(options)

    def hold(self, model: nn.Module, tokenizer: Any) -> None:
        """Serve this target from now on."""
        self.model, self.tokenizer = model, tokenizer
        self.model_key = ("held", None, None)

    def load(self, *names: Any) -> tuple[Any, Any]:
        """Return what is held; requests cannot load anything."""
        return self.model, self.tokenizer


class EngineThread(ResponseGenerator):
    """mlx-lm's generation thread, with another loop in it.

    The thread starts with the constructor, so whoever derives sets its own attributes
    before it calls this one.
    """

    model_provider: Provider

    def __init__(self, provider: Provider) -> None:
        self._starter = threading.current_thread()
        atexit.register(self.end, EXIT_SECONDS)
        super().__init__(provider, LRUPromptCache(0))

    def work(self) -> None:
        """Do everything, until `stopping`."""
        raise NotImplementedError

    def end(self, seconds: float) -> bool:
        """Ask the thread to end, and return whether it has.

        After Python's end of a thread mlx frees what it keeps for it, and asks for the
        interpreter's lock: a process that ends meanwhile aborts. So on Linux the end is
        that of the system's thread.
        """
        self._stop = True
        atexit.unregister(self.end)
        thread, until = self._generation_thread, time.monotonic() + seconds
        thread.join(seconds)
        left = Path(f"/proc/self/task/{thread.native_id}")
        while not thread.is_alive() and left.exists() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return not thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread runs, and has not failed."""
        return bool(self.generation_available())

    @property
    def stopping(self) -> bool:
        """Whether the thread is to end.

        Also at the end of the program that has started it: Python waits for it there.
        """
        users = threading.main_thread(), self._starter
        return bool(self._stop) or not any(each.is_alive() for each in users)

    def rendered(
        self, request: CompletionRequest, template_args: dict[str, Any] | None
    ) -> tuple[list[int], str]:
        """Return a chat's token ids, and in what its answer begins.

        That is "normal" or, where the template has begun to think, "reasoning".
        """
        tokens, _, _, state, _ = self._tokenize(
            self.model_provider.tokenizer,
            request,
            SimpleNamespace(chat_template_kwargs=template_args),
        )
        return [int(token) for token in tokens], str(state)

    def answer_parser(
        self, request: CompletionRequest, state: str, most_calls: int | None
    ) -> AnswerParser:
        """Return what divides an answer; the text of a completion is one part."""
        tokenizer = self.model_provider.tokenizer
        read = partial(read_calls, parser=tokenizer.tool_parser, tools=request.tools)
        if request.request_type != "chat":
            return AnswerParser(None, read=read)
        _, machine = self._make_state_machine(
            self.model_provider.model_key, tokenizer, ()
        )
        marks = Marks(machine, _marks_of(tokenizer))
        return AnswerParser(marks, state, read=read, most_calls=most_calls)

    def _generate(self) -> None:
        try:
            self.work()
        finally:
            self.model_provider.reset()


class ChatHandler(APIHandler):
    """mlx-lm's handler of one connection, whose refusals are exceptions."""

    def __init__(self, engine: EngineThread, fingerprint: str, *arguments: Any) -> None:
        super().__init__(engine, *arguments, system_fingerprint=fingerprint)

    def handle_request(self, body: bytes) -> None:
        """Let mlx-lm's server read a request; it calls `handle_completion` then.

        Args:
            body: JSON, in place of what the client has sent.

        Raises:
            Refused: mlx-lm's server finds something wrong.
        """
        self.rfile: Any = io.BytesIO(body)
        del self.headers["Content-Length"]
        self.headers["Content-Length"] = str(len(body))
        super().do_POST()

    def send_answer(
        self, parser: AnswerParser, pieces: Iterable[Piece], *, last: bool = True
    ) -> None:
        """Form and send an answer; a stream of several texts ends with the last."""
        if self.stream:
            self._set_stream_headers(200)
            self.end_headers()
        else:
            self._set_completion_headers(200)
        whole, calls = Parts(), 0
        for piece in pieces:
            parts = parser.feed(piece.text)
            if piece.result is not None:
                parts += parser.end()
            if not self.stream:
                whole += parts
            elif parts:
                self._send_event(self._formed(parts, None, calls))
                calls += len(parts.calls)
        if self.stream:
            self._send_event(self._formed(whole, "stop", calls))
            if last:
                self._end_stream()
            return
        body = json.dumps(self._formed(whole, "stop")).encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _formed(
        self, parts: Parts, reason: Any, calls: int | None = None
    ) -> dict[str, Any]:
        """Return a packet of an answer; `calls` are those that a stream has sent."""
        named: Any = [
            call.as_object(None if calls is None else calls + index)
            for index, call in enumerate(parts.calls)
        ]
        packet: dict[str, Any] = self.generate_response(
            parts.content,
            reason,
            *(0, 0),  # the counts are put in afterwards
            tool_calls=named,
            reasoning_text=parts.reasoning,
        )
        return packet

    def _end_stream(self) -> None:
        if self.stream_options is not None and self.stream_options["include_usage"]:
            self._send_event(self.completion_usage_response(0, 0))
        self.wfile.write(b"data: [DONE]\n\n")
        self.wfile.flush()

    def _send_event(self, packet: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(packet)}\n\n".encode())
        self.wfile.flush()

    def forget_headers(self) -> None:
        """Drop the lines of an answer that were not sent."""
        self._headers_buffer: list[bytes] = []

    def send_header(self, keyword: str, value: str) -> None:
        """Name what "*" leaves out: browsers ask for the key's header by its name."""
        if keyword == "Access-Control-Allow-Headers":
            value = "Authorization, Content-Type, *"
        super().send_header(keyword, value)

    def cross_origin_headers(self) -> None:
        """Add the headers by which a browser lets pages read the answer."""
        if getattr(self, "headers", None) is not None:
            self._set_cors_headers()

    def _set_completion_headers(self, status_code: int = 200) -> None:
        if status_code >= 400:
            raise Refused(str(sys.exc_info()[1] or f"status {status_code}"))
        super()._set_completion_headers(status_code)


def _marks_of(tokenizer: Any) -> tuple[str, ...]:
    """Return all marks that `make_text_state_machine` lets the machine look for."""
    edges = [
        mark for edges in tokenizer.response_transitions.values() for mark, _ in edges
    ]
    ends = (
        *(tokenizer.think_start, tokenizer.think_end),
        *(tokenizer.tool_call_start, tokenizer.tool_call_end),
    )
    marks = (*ends, *(tokenizer.structural_markers or ()), *edges)
    return tuple(mark for mark in marks if mark)
