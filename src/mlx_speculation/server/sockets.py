"""Sockets: reading within a time, seeing that a client has left, and parting well."""

import io
import select
import socket
import time

DRAIN_SECONDS = 2.0
DRAIN_BYTES = 64 << 20


class LateError(Exception):
    """Raised where a request has not arrived in time."""


class TimedReader(io.RawIOBase):
    """Reads a socket until a moment in time, however the bytes drip in."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read once.

        Raises:
            LateError: the time is over. http.server would pass over a TimeoutError.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise LateError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        except TimeoutError as error:
            raise LateError from error


def client_left(connection: socket.socket) -> bool:
    """Return whether the other side has closed, also if only its own direction."""
    watch = select.poll()
    watch.register(connection, select.POLLIN)
    if not watch.poll(0):
        return False
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def drain(connection: socket.socket) -> None:
    """Read what a refused client still sends, so that it gets to read its answer.

    A socket that is closed with unread bytes is reset, and the answer is lost.
    """
    end, left = time.monotonic() + DRAIN_SECONDS, DRAIN_BYTES
    try:
        connection.shutdown(socket.SHUT_WR)
        while left > 0 and (seconds := end - time.monotonic()) > 0:
            connection.settimeout(seconds)
            got = len(connection.recv(1 << 16))
            if got == 0:
                return
            left -= got
    except OSError:
        return
