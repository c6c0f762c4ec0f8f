"""The server: starts and stops the engine, and HTTP by uvicorn in a thread."""

import socket
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn

from mlx_speculation import PrefixCache
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.server.api_errors import LOG
from mlx_speculation.server.config import Settings
from mlx_speculation.server.engine_thread import MakeGenerator, Worker
from mlx_speculation.server.http_protocol import BoundedProtocol
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.routes import Api

POLL_SECONDS = 0.02
# Seconds for the running round or prompt chunk to end; for clients to read answers.
ENGINE_SECONDS, PARTING_SECONDS = 5.0, 2.0


class Server:
    """Serves a target and its draft over HTTP; `with` starts and stops the server.

    Raises:
        InvalidRequestError: the address cannot be used.
    """

    worker: Worker  # the engine, set by `start`

    def __init__(
        self,
        settings: Settings,
        make_generator: MakeGenerator,  # called in the thread that will run the models
        *,
        prefixes: PrefixCache | None = None,  # None: no prompt is reused
        host: str = "127.0.0.1",
        port: int = 0,  # 0: any free port
    ) -> None:
        self._settings, self._metrics = settings, Metrics(settings.names[0])
        self._make_generator, self._prefixes = make_generator, prefixes
        self._engine_ended: bool | None = None  # None: `stop` was not called
        self._socket = _bound(host, port)
        name = self._socket.getsockname()
        shown = f"[{name[0]}]" if ":" in name[0] else name[0]
        self.url = f"http://{shown}:{name[1]}"  # without a path

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._http.server_state.connections)

    def start(self) -> None:
        """Load the models, and take requests."""
        settings, metrics = self._settings, self._metrics
        self.worker = Worker(settings, metrics, self._make_generator, self._prefixes)
        try:
            self.worker.loaded.result()
        except BaseException:
            self._socket.close()
            self.worker.end(PARTING_SECONDS)
            raise
        protocol = partial(BoundedProtocol, limits=settings.limits, metrics=metrics)
        config = uvicorn.Config(
            Api(self.worker, settings, metrics).app(),
            http=protocol,  # type: ignore[arg-type]
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._http.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()
        while not self._http.started and self._thread.is_alive():
            time.sleep(POLL_SECONDS)

    def stop(self, grace: float = 0.0) -> bool:
        """Refuse new requests, and stop the server. A second call does nothing.

        Requests that still run after `grace` seconds end with an error.

        Returns:
            False if the engine hangs: mlx may abort this process when it exits.
        """
        if self._engine_ended is not None:
            return self._engine_ended
        self._engine_ended = False
        self.worker.closed = "The server is shutting down."
        end = time.monotonic() + grace
        while self.worker.taken and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self._engine_ended = self.worker.end(ENGINE_SECONDS)
        self._close()
        if not self._engine_ended:
            LOG.error("the engine has not ended within %g seconds", ENGINE_SECONDS)
        return self._engine_ended

    def _close(self) -> None:
        """Accept no more connections; close open ones once their answers are read."""
        self._http.should_exit = True
        self._thread.join(PARTING_SECONDS)
        connection: Any
        for connection in tuple(self._http.server_state.connections):
            with suppress(RuntimeError):  # the loop has ended
                connection.loop.call_soon_threadsafe(connection.transport.abort)
        self._http.force_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _bound(host: str, port: int) -> socket.socket:
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        infos = socket.getaddrinfo(host, port, type=kind, flags=flags)
        family, _, _, _, address = infos[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]  # `socket` appends the address
        raise InvalidRequestError(
            f"The server cannot listen at {host!r}, port {port}: {why}. "
            "Choose others with --host and --port."
        ) from error
