"""HTTP connections with limits, and requests that are refused by their headers.

A request has to arrive within `Limits.read_seconds`, and a client has the same time to
read each piece of its answer.
"""

import asyncio
import hmac
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.config import Limits, Settings
from mlx_speculation.server.metrics import Metrics

# Seconds for a refused client to read its answer: closing a socket with unread bytes
# resets the connection, and the answer is lost.
DRAIN_SECONDS = 2.0
MOST_HEADERS, LARGEST_HEAD = 100, 1 << 15
# Paths that need no API key: they say that a server runs, and how to use it.
OPEN = ("/", "/health", "/api/hello", "/docs", "/openapi.json")


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *, limits: Limits, metrics: Metrics, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits, self._metrics = limits, metrics
        self._deadline: asyncio.TimerHandle | None = None  # for the request to arrive
        self._stalled: asyncio.TimerHandle | None = None  # for the client to read
        self._refusing = False  # further bytes are dropped

    def connection_made(self, transport: Any) -> None:
        """Begin, or refuse if there are too many connections."""
        transport.set_write_buffer_limits(high=0)  # each piece has its own deadline
        if len(self.connections) < self._limits.connections:
            super().connection_made(transport)
            self._arm()
            return
        self.transport = transport
        error = ApiError(
            503,
            f"All {len(self.connections)} connections that are allowed are in use. Try "
            "again later.",
            code="too_many_connections",
            retry=True,
        )
        self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines of this client."""
        for timer in (self._deadline, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes; the first ones of a request start its deadline."""
        if self._refusing:
            return
        if self._deadline is None and not self._answering:
            self._arm()
        super().data_received(data)

    def eof_received(self) -> None:
        """Close, with an error for a client that has not sent its whole request."""
        if self._refusing:
            return
        cut_head = not self._answering and bool(self.conn.trailing_data[0])
        cut_body = self._answering and self.cycle.more_body
        if cut_head or (cut_body and not self.cycle.response_started):
            part = "The head" if cut_head else "The body"
            self._refuse(invalid(f"{part} of the request ends too early."))

    def handle_events(self) -> None:
        """Process received bytes; cancel the deadline of a complete request."""
        super().handle_events()
        if self._answering and not self.cycle.more_body and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP; uvicorn calls this in its handler of the error."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        self._refuse(ApiError(431 if hint == 431 else 400, msg))

    def pause_writing(self) -> None:
        """Start the deadline for the client to read."""
        super().pause_writing()
        seconds = self._limits.read_seconds
        self._stalled = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the deadline for the client to read."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    @property
    def _answering(self) -> bool:
        """True while a request is received or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _arm(self) -> None:
        seconds = self._limits.read_seconds
        self._deadline = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._deadline = None
        if self._answering and self.cycle.response_started:
            self.transport.abort()
            return
        seconds = self._limits.read_seconds
        text = f"The request did not arrive within {seconds:g} seconds."
        self._refuse(ApiError(408, text, retry=False))

    def _refuse(self, error: ApiError) -> None:
        """Send an error, and close after `DRAIN_SECONDS`."""
        self._refusing = True
        self._metrics.add("requests_refused", error.status)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        headers, body = error.closing()
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.write_eof()
        self.loop.call_later(DRAIN_SECONDS, self.transport.abort)


class Gate:
    """Refuses requests by their headers."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        headers = Headers(scope=scope)
        name = f"req_{uuid.uuid4().hex}"

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = name
            await send(message)

        try:
            check_framing(scope)
            check_permission(headers, scope["path"], self._settings)
            if scope["method"] == "POST":
                check_size(headers, self._settings.limits.body_bytes)
                # A body is read as JSON, whatever its Content-Type.
                MutableHeaders(scope=scope)["content-type"] = "application/json"
        except ApiError as error:
            self._metrics.add("requests_refused", error.status)
            await refuse(error, scope, receive, send_named)
            return
        await self._app(scope, receive, send_named)


def check_framing(scope: Scope) -> None:
    """Refuse ambiguous framing, a large head, and versions other than 1.0 and 1.1."""
    names = [name for name, _ in scope["headers"]]
    # h11 ignores a length beside Transfer-Encoding. A proxy that does not would take a
    # part of one client's body for the next client's request.
    if b"transfer-encoding" in names and b"content-length" in names:
        raise invalid(
            "Transfer-Encoding and Content-Length are both given. Send Content-Length "
            "alone."
        )
    size = len(scope["raw_path"]) + sum(len(n) + len(v) for n, v in scope["headers"])
    if len(names) > MOST_HEADERS or size > LARGEST_HEAD:
        raise ApiError(
            431,
            f"The head has {len(names)} headers and {size} bytes; at most "
            f"{MOST_HEADERS} headers and {LARGEST_HEAD} bytes are allowed.",
        )
    if scope["http_version"] not in ("1.0", "1.1"):
        raise ApiError(505, "The server supports only HTTP/1.1 and 1.0.")


def check_permission(headers: Headers, path: str, settings: Settings) -> None:
    """Refuse web pages of disallowed origins, and clients without the API key."""
    origin, allowed = headers.get("origin"), settings.allowed_origins
    if origin is not None and "*" not in allowed and origin not in allowed:
        raise ApiError(
            403,
            f"Pages of {origin[:200]!r} may not use this server. Its option "
            "--allowed-origins names those that may.",
            code="origin_not_allowed",
        )
    if settings.api_key is None or path in OPEN:
        return
    kind, _, shown = headers.get("authorization", "").partition(" ")
    keys = [headers.get("x-api-key", ""), shown if kind.lower() == "bearer" else ""]
    # Headers are Latin-1. Both keys are always compared, so the time reveals nothing.
    wanted = settings.api_key.strip().encode()
    given = [key.strip().encode("latin-1", "replace") for key in keys]
    if not sum(hmac.compare_digest(key, wanted) for key in given):
        raise ApiError(
            401,
            "The API key is missing or wrong. Send Authorization: Bearer KEY, or "
            "x-api-key: KEY.",
            code="invalid_api_key",
        )


def check_size(headers: Headers, most: int) -> None:
    """Refuse a body whose length is missing or larger than `most` bytes."""
    given = headers.get("content-length")
    if given is None:
        raise ApiError(411, "Content-Length is missing. Send it.")
    if int(given) > most:
        raise ApiError(
            413,
            f"The body has {given} bytes; at most {most} are allowed. Send less, or "
            "start the server with a larger --max-body-bytes.",
            code="body_too_large",
        )


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, and close once the client has sent its body."""
    headers, body = error.closing(scope["path"])

    async def content() -> AsyncIterator[bytes]:
        yield body
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while (await receive()).get("more_body"):
                    pass

    await StreamingResponse(content(), error.status, headers).stream_response(send)
