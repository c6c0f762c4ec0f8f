"""The listening socket, served by uvicorn in a thread."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.server.config import Limits
from mlx_speculation.server.http_protocol import BoundedProtocol

POLL_SECONDS = 0.02
BACKLOG = 128


class Listener:
    """Serves an app at an address until `close` is called.

    Raises:
        InvalidRequestError: the address cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        refused: Callable[[int], None],  # called with the status of each refusal
        *,
        host: str = "127.0.0.1",
        port: int = 0,  # 0: any free port
    ) -> None:
        self.socket = _bound(host, port)
        name = self.socket.getsockname()
        shown = f"[{name[0]}]" if ":" in name[0] else name[0]
        self.url = f"http://{shown}:{name[1]}"  # without a path
        config = uvicorn.Config(
            app,
            # uvicorn calls it for each connection, as it would call a protocol class.
            http=cast("Any", partial(BoundedProtocol, limits=limits, refused=refused)),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._server.server_state.connections)

    def start(self) -> None:
        """Accept connections; return once uvicorn has started."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(POLL_SECONDS)

    def close(self, seconds: float) -> None:
        """Accept no more connections, and close the open ones.

        Clients have `seconds` to read their answers.
        """
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(seconds)
            for each in tuple(self._server.server_state.connections):
                protocol = cast("Any", each)
                with suppress(RuntimeError):  # the loop has ended
                    protocol.loop.call_soon_threadsafe(protocol.transport.abort)
            self._server.force_exit = True
            self._thread.join()
        self.socket.close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        result = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = result[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidRequestError(
            f"The server cannot listen at {host!r}, port {port}: {error.strerror}. "
            "Choose others with --host and --port."
        ) from error
