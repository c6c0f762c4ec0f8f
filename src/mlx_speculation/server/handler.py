"""One connection: who may ask, what may be asked, and the answer."""

import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from mlx_speculation import __version__
from mlx_speculation.server import response as replies
from mlx_speculation.server.access import (
    CHATS,
    MODELS,
    TEXTS,
    check_permission,
    no_such_path,
)
from mlx_speculation.server.api_errors import ApiError, as_api_error, invalid, late
from mlx_speculation.server.config import Settings
from mlx_speculation.server.engine_thread import Worker
from mlx_speculation.server.job import ClientLeftError, Job, Piece, Read, Token
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.mlx_lm_server import (
    ChatHandler,
    CompletionRequest,
    Refused,
)
from mlx_speculation.server.request import (
    CheckedRequest,
    check_framing,
    parsed,
    read_body,
    read_request,
)
from mlx_speculation.server.schemas import SchemaConstraint, call_grammar
from mlx_speculation.server.sockets import (
    LateError,
    TimedReader,
    client_left,
    drain,
)

LOG = logging.getLogger("mlx_speculation.server")
FINGERPRINT = f"mlx-speculation-{__version__}"
WELCOME = {
    "server": FINGERPRINT,
    "api": "OpenAI's, of chats and completions, at /v1",
    "paths": [*CHATS[:1], *TEXTS, MODELS, "/health", "/metrics"],
}


class Handler(ChatHandler):
    """Answers one request of one connection."""

    server_version, sys_version = "mlx-speculation", ""
    # What is answered before a request line was read, and to one without a version.
    request_version = default_request_version = "HTTP/1.0"
    requestline, command = "", ""

    def __init__(
        self, worker: Worker, settings: Settings, metrics: Metrics, *arguments: Any
    ) -> None:
        self._worker, self._settings, self._metrics = worker, settings, metrics
        self._sent = self._refused = self._called_tool = False
        self._checked: CheckedRequest | None = None
        self._job: Job | None = None
        self._result: Any = None
        self._unsent: list[Token] = []
        self._choice = 0  # which of the texts is answered
        self._usages: list[dict[str, Any]] = []  # of the texts that have ended
        self._packet: dict[str, Any] = {}  # the last one that was formed
        super().__init__(worker, FINGERPRINT, *arguments)

    def setup(self) -> None:
        """Let reading end in time."""
        super().setup()
        seconds = self._settings.limits.read_seconds
        self.rfile = io.BufferedReader(TimedReader(self.connection, seconds))

    def handle_one_request(self) -> None:
        """Answer, whatever comes."""
        self._guarded(super().handle_one_request)

    def finish(self) -> None:
        """Part with the client."""
        super().finish()
        if self._refused:
            drain(self.connection)

    def do_POST(self) -> None:  # noqa: N802  the name is http.server's
        """Answer with a text."""
        self._guarded(self._post)

    def do_GET(self) -> None:  # noqa: N802
        """Answer with what there is."""
        self._guarded(self._get)

    def send_error(
        self, code: int, message: str | None = None, explain: str | None = None
    ) -> None:
        """Refuse what is no request, as http.server asks for it."""
        status = 405 if code == HTTPStatus.NOT_IMPLEMENTED else int(code)
        self._send_refusal(ApiError(status, message or HTTPStatus(status).phrase))

    def end_headers(self) -> None:
        """Send the headers; once for all texts of a stream."""
        if self._sent:
            self.forget_headers()
            return
        super().end_headers()
        self._sent = True

    def log_message(self, format: str, *values: Any) -> None:
        """Log a line; what a client has sent is shown as a literal."""
        LOG.info("%s %s", self.client_address[0], ascii(format % values))

    def handle_completion(
        self, request: CompletionRequest, stop_words: list[str]
    ) -> None:
        """Hand a request to the engine, and send what comes back."""
        assert self._checked is not None
        with ExitStack() as held:
            jobs = [
                self._submitted(one, request, held) for one in self._checked.texts()
            ]
            if len(jobs) == 1:
                self._answer(jobs[0])
            elif self._checked.stream:
                self._stream_all(jobs)
            else:
                self._answer_all(jobs)

    def _submitted(
        self, checked: CheckedRequest, request: CompletionRequest, held: ExitStack
    ) -> Job:
        """Let the engine begin with one text; `held` ends it."""
        job = Job(checked, request, self._settings.limits.seconds)
        self._worker.take()
        try:
            job.constraint = self._constraint(job, held)
        except BaseException as error:
            if isinstance(error, ClientLeftError):
                self._metrics.cancelled()
            self._worker.done()
            raise
        held.callback(job.cancel)
        self._worker.submit(job)
        return job

    def _answer(self, job: Job, choice: int = 0, *, last: bool = True) -> None:
        """Send one text as it comes."""
        self._job, self._choice = job, choice
        self._result, self._unsent = None, []
        self._called_tool = False
        parser = job.wait(self._check)
        self.send_answer(parser, self._pieces(job), last=last)

    def _stream_all(self, jobs: Sequence[Job]) -> None:
        """Stream texts one after the other; all of them are generated meanwhile."""
        for choice, job in enumerate(jobs):
            self._answer(job, choice, last=job is jobs[-1])

    def _answer_all(self, jobs: Sequence[Job]) -> None:
        """Send all texts as one answer, of which mlx-lm's server forms each."""
        answer, file = None, self.wfile
        for choice, job in enumerate(jobs):
            self.wfile = io.BytesIO()
            try:
                self._answer(job, choice)
            finally:
                self.wfile, self._sent = file, False
                self.forget_headers()
            if answer is None:
                answer = self._packet
            else:
                answer["choices"] += self._packet["choices"]
        assert answer is not None
        answer["usage"] = replies.total(self._usages)
        self._send(200, json.dumps(answer).encode())

    def generate_response(
        self, text: str, finish_reason: Any, *more: Any, **options: Any
    ) -> dict[str, Any]:
        """Return a packet of the answer, with what mlx-lm's server does not say."""
        packet: dict[str, Any] = super().generate_response(
            text, finish_reason, *more, **options
        )
        self._called_tool |= bool(options.get("tool_calls"))
        choice = packet["choices"][0]
        choice["index"], self._packet = self._choice, packet
        choice["logprobs"] = self._logprobs()
        if finish_reason is not None:
            choice["finish_reason"] = self._reason()
            self._usages.append(self._usage())
        if "usage" in packet:
            packet["usage"] = self._usages[-1]
        return packet

    def completion_usage_response(self, *counts: Any) -> dict[str, Any]:
        """Return the packet that ends a stream with its usage."""
        packet: dict[str, Any] = super().completion_usage_response(*counts)
        packet["object"] = self.object_type
        packet["usage"] = replies.total(self._usages)
        return packet

    def _constraint(self, job: Job, held: ExitStack) -> SchemaConstraint | None:
        """Compile what the text has to fit, beside the engine; `held` ends it."""
        checked, tokenizer = job.checked, self._worker.model_provider.tokenizer
        wanted: Any = checked.schema
        if checked.calls is not None:
            wanted = call_grammar(checked.calls, tokenizer)
        if wanted is None:
            return None

        def check() -> None:
            self._check()
            if job.late:
                raise late(self._settings.limits.seconds, began=False)

        constraint = self._worker.schemas.compile(wanted, tokenizer, check)
        held.callback(constraint.close)
        return constraint

    def _pieces(self, job: Job) -> Iterator[Piece]:
        """Yield the text in pieces, and note what is not text."""
        for piece in job.pieces(self._check):
            if isinstance(piece, Read):
                self._keep_alive(piece.tokens, job.prompt_tokens)
                continue
            self._unsent += piece.tokens
            self._result = piece.result
            yield piece

    def _keep_alive(self, read: int, of: int) -> None:
        """Let proxies see that a stream with a long prompt goes on, as mlx-lm does."""
        assert self._checked is not None
        if self._checked.stream:
            self.wfile.write(f": keepalive {read}/{of}\n\n".encode())

    def _check(self) -> None:
        """Raise where waiting is of no use."""
        self._worker.check_alive()
        if client_left(self.connection):
            raise ClientLeftError

    def _reason(self) -> str:
        reason = str(self._result.finish_reason)
        return "tool_calls" if self._called_tool and reason == "stop" else reason

    def _logprobs(self) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens since the packet before."""
        assert self._checked is not None
        if self._checked.logprobs is None:
            return None
        tokens, self._unsent = self._unsent, []
        if not tokens:
            return None
        if self._checked.chat:
            return replies.chat_logprobs(tokens)
        return replies.text_logprobs(tokens)

    def _usage(self) -> dict[str, Any]:
        assert self._checked is not None
        assert self._job is not None
        draft = self._checked.draft or self._settings.draft
        # A prompt of several texts is read once, or its caches are copied.
        again = self._choice % self._checked.count > 0
        read = 0 if again else self._job.prompt_tokens
        return replies.usage(self._result, read, draft)

    def _post(self) -> None:
        check_framing(self.headers)
        check_permission(self.headers, self._settings)
        self.path = self.path.partition("?")[0]
        if self.path not in (*CHATS, *TEXTS):
            raise no_such_path(self.command, self.path)
        most = self._settings.limits.body_bytes
        body = parsed(read_body(self.headers, self.rfile, most))
        settings = replace(self._settings, reads_images=self._worker.reads_images)
        checked = read_request(body, settings, chat=self.path in CHATS)
        self._checked = self._worker.with_pictures(checked)
        self.connection.settimeout(self._settings.limits.read_seconds)
        self.handle_request(json.dumps(self._checked.body).encode())

    def _get(self) -> None:
        check_framing(self.headers)
        path = self.path.partition("?")[0]
        if path == "/health":
            ready = self._worker.ready
            status = {"status": "ok" if ready else "unavailable"}
            self._send(200 if ready else 503, json.dumps(status).encode())
            return
        if path == "/":
            self._send(200, json.dumps(WELCOME).encode())
            return
        check_permission(self.headers, self._settings)
        if path == "/metrics":
            page, kind = self._metrics.page()
            self._send(200, page, {"Content-Type": kind})
        elif path == MODELS or path.startswith(f"{MODELS}/"):
            self._send(200, json.dumps(self._models(path)).encode())
        else:
            raise no_such_path(self.command, self.path)

    def _models(self, path: str) -> dict[str, Any]:
        """Return the list of models, or one of them."""
        own = {
            "id": self._settings.names[0],
            "object": "model",
            "created": self.created,
            "owned_by": "mlx-speculation",
        }
        # Names of repositories hold a slash, which clients encode.
        name = unquote(path.removeprefix(MODELS).removeprefix("/"))
        if not name:
            return {"object": "list", "data": [own]}
        if name not in self._settings.names:
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here.",
                param="model",
                code="model_not_found",
            )
        return own

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do something that answers; an exception becomes an answer."""
        try:
            act()
        except (ClientLeftError, ConnectionError, TimeoutError):
            LOG.info("%s went away, or does not read", self.client_address[0])
        except LateError:
            seconds = self._settings.limits.read_seconds
            text = f"The request did not arrive within {seconds:g} seconds."
            self._fail(ApiError(408, text, retry=False))
        except Refused as refused:
            self._fail(invalid(str(refused)))
        except Exception as error:
            if as_api_error(error).status == 500 and not isinstance(error, ApiError):
                LOG.error("a connection failed", exc_info=error)
            self._fail(as_api_error(error))

    def _fail(self, error: ApiError) -> None:
        """Say what is wrong; after the headers of a stream as its last event."""
        try:
            if not self._sent:
                self._send_refusal(error)
            elif self._checked is not None and self._checked.stream:
                self._metrics.refused(error.status)
                self.wfile.write(f"data: {json.dumps(error.body)}\n\n".encode())
        except OSError:
            LOG.info("%s went away", self.client_address[0])

    def _send_refusal(self, error: ApiError) -> None:
        self._refused = True
        self._metrics.refused(error.status)
        self.forget_headers()
        self._send(error.status, json.dumps(error.body).encode(), error.headers)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """Send an answer as a whole."""
        self.send_response(status)
        kinds = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in {**kinds, **(headers or {})}.items():
            self.send_header(name, value)
        self.cross_origin_headers()
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
