"""Requests that are refused by their headers, before their body is read."""

import asyncio
import hmac
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.config import Settings
from mlx_speculation.server.http_protocol import DRAIN_SECONDS
from mlx_speculation.server.metrics import Metrics

MOST_HEADERS, LARGEST_HEAD = 100, 1 << 15
# Paths that need no API key: they say that a server runs, and how to use it.
OPEN = ("/", "/health", "/api/hello", "/docs", "/openapi.json")


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
