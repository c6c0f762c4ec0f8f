"""A server: sockets in front, the engine behind, and how both begin and end."""

import json
import logging
import socket
import socketserver
import threading
import time
from functools import partial
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.config import Settings
from mlx_speculation.server.engine_thread import MakeGenerator, Worker
from mlx_speculation.server.handler import Handler
from mlx_speculation.server.metrics import Metrics

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache

LOG = logging.getLogger("mlx_speculation.server")
POLL_SECONDS = 0.02
# For a round, or a chunk of a prompt, that has begun; then for clients to read.
ENGINE_SECONDS, PARTING_SECONDS = 5.0, 2.0


class Listener(ThreadingHTTPServer):
    """Accepts connections, each with a thread of its own, up to a number of them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: Any,
        family: socket.AddressFamily,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.address_family = family
        self._settings, self._metrics = settings, metrics
        self.open = 0  # connections
        self._lock = threading.Lock()
        self.worker: Worker | None = None
        super().__init__(address, self._handler)

    def _handler(self, *arguments: Any) -> Handler:
        assert self.worker is not None
        return Handler(self.worker, self._settings, self._metrics, *arguments)

    def server_bind(self) -> None:
        """Bind without a look-up of this machine's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, if there may be one more."""
        with self._lock:
            full = self.open >= self._settings.limits.connections
            self.open += not full
        if full:
            self._turn_away(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self.open -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what no handler has caught."""
        LOG.exception("the connection of %s failed", client_address)

    def _turn_away(self, request: Any) -> None:
        error = ApiError(
            503,
            f"There are {self.open} connections, and no more may be. Try again later.",
            code="too_many_connections",
            retry=True,
        )
        self._metrics.refused(error.status)
        try:
            request.settimeout(1.0)
            request.sendall(raw_answer(error))
        except OSError:
            LOG.info("a client that was turned away has left")
        self.shutdown_request(request)


class Server:
    """Serves one pair of models over HTTP.

        with Server(settings, make_generator) as server:
            print(server.url)

    Raises:
        InvalidRequestError: the address cannot be used.
        MissingLibraryError: prometheus-client is not installed.
    """

    def __init__(
        self,
        settings: Settings,  # see `Settings`
        # Loads the models; called in the thread that will run them, with `prefixes`
        make_generator: MakeGenerator,
        *,
        # Kept between requests; None: every prompt is read anew
        prefixes: "PrefixCache | None" = None,
        host: str = "127.0.0.1",  # the address to listen at
        port: int = 0,  # 0 takes a free one
    ) -> None:
        self.metrics = Metrics(settings.names[0])
        self._ended = self._engine_ended = False
        self._listener = _listening(host, port, settings, self.metrics)
        self._make = partial(Worker, settings, self.metrics, make_generator, prefixes)
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(POLL_SECONDS,), daemon=True
        )

    @property
    def worker(self) -> Worker:
        """The engine, once it was started."""
        assert self._listener.worker is not None
        return self._listener.worker

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._listener.open

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        host, port = self._listener.server_address[:2]
        name = str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}"

    def start(self) -> None:
        """Load the models, and take requests.

        Raises:
            Exception: whatever the loading has raised.
        """
        self._listener.worker = self._make()
        try:
            self.worker.loaded.result()
        except BaseException:
            self._listener.server_close()
            self.worker.end(PARTING_SECONDS)
            raise
        self._thread.start()

    def stop(self, grace: float = 0.0) -> bool:
        """Take no more requests, and end. The second call does nothing.

        Args:
            grace: seconds for what runs; what has not ended by then is cut off, and
                its clients get an error that says so.

        Returns:
            Whether the engine has ended. One that hangs is left behind, and this
            process cannot end by itself.
        """
        if self._ended:
            return self._engine_ended
        self._ended = True
        self.worker.refuse("The server is shutting down.")
        end = time.monotonic() + grace
        while self.worker.taken and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self._engine_ended = self.worker.end(ENGINE_SECONDS)
        end = time.monotonic() + PARTING_SECONDS
        while self._listener.open and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()
        if not self._engine_ended:
            LOG.error("the engine has not ended within %g seconds", ENGINE_SECONDS)
        return self._engine_ended

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def raw_answer(error: ApiError) -> bytes:
    """Return an error as it goes over the wire, where there is no handler."""
    body = json.dumps(error.body).encode()
    lines = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **error.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.0 {error.status} Refused\r\n{head}\r\n".encode() + body


def _listening(host: str, port: int, settings: Settings, metrics: Metrics) -> Listener:
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        return Listener(address, family, settings, metrics)
    except OSError as error:
        raise InvalidRequestError(
            f"The server cannot listen at {host!r}, port {port}: {error.strerror}. "
            "Choose others with --host and --port."
        ) from error
