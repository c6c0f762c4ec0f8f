"""What of mlx-lm's own server is run with another engine: three classes, narrowed.

    Provider        holds the target that somebody else has loaded
    EngineThread    one thread in which everything of mlx happens
    ChatHandler     routes, chat templates, tool calls, reasoning, server-sent events

mlx-lm's server renders chats, takes tool calls and reasoning out of the text, and forms
the answers. Here it does not load, choose tokens, or keep caches. This module is
imported by name only, since it imports all of mlx-lm.
"""

import atexit
import io
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import (
    APIHandler,
    CompletionRequest,
    GenerationContext,
    ModelProvider,
    Response,
    ResponseGenerator,
)

from mlx_speculation.errors import InvalidRequestError

__all__ = [
    "ChatHandler",
    "CompletionRequest",
    "EngineThread",
    "GenerationContext",
    "Provider",
    "Refused",
    "options_of",
    "response",
]

# A response without one is followed by more.
ENDED = "length"
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


def response(text: str, token: int, *, ended: bool) -> Response:
    """Return a piece of text as mlx-lm's server takes it.

    The end is always "length": at "stop" the server drops what it still holds back and
    the piece itself, since it has found a stop string in it. Here stop strings are cut
    before, and whoever forms the answer puts the true reason in.
    """
    nothing: Any = ()
    return Response(text, token, 0.0, ENDED if ended else None, nothing)


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

    def context(self, prompt: list[int], state: str) -> GenerationContext:
        """Return what forms an answer: where thoughts and tool calls begin and end."""
        tokenizer = self.model_provider.tokenizer
        _, texts = self._make_state_machine(
            self.model_provider.model_key, tokenizer, ()
        )
        return GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=texts,
            initial_state=state,
            prompt=prompt,
        )

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
        self,
        request: CompletionRequest,
        context: GenerationContext,
        responses: Iterator[Response],
    ) -> None:
        """Let mlx-lm's server form and send an answer."""
        options = self.response_generator.cli_args
        self.response_generator: Any = _Answer(options, context, responses)
        super().handle_completion(request, [])

    def forget_headers(self) -> None:
        """Drop the lines of an answer that were not sent."""
        self._headers_buffer: list[bytes] = []

    def cross_origin_headers(self) -> None:
        """Add the headers by which a browser lets pages read the answer."""
        if getattr(self, "headers", None) is not None:
            self._set_cors_headers()

    def _set_completion_headers(self, status_code: int = 200) -> None:
        if status_code >= 400:
            raise Refused(str(sys.exc_info()[1] or f"status {status_code}"))
        super()._set_completion_headers(status_code)


class _Answer:
    """What mlx-lm's handler takes for its engine while it answers one request."""

    def __init__(
        self,
        options: Namespace,
        context: GenerationContext,
        responses: Iterator[Response],
    ) -> None:
        self.cli_args = options
        self._answer = context, responses

    def generate(
        self, *request: Any, progress_callback: Any = None
    ) -> tuple[GenerationContext, Iterator[Response]]:
        """Return the answer."""
        return self._answer
