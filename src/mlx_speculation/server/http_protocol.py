"""HTTP connections: uvicorn's protocol on h11, with deadlines and a maximum number.

A request has to arrive within `Limits.read_seconds`, and a client has the same time to
read each piece of its answer.
"""

import asyncio
import sys
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_speculation.server.api_errors import ApiError, invalid
from mlx_speculation.server.config import Limits
from mlx_speculation.server.metrics import Metrics

# Seconds for a refused client to read its answer: closing a socket with unread bytes
# resets the connection, and the answer is lost.
DRAIN_SECONDS = 2.0


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
