"""The server: starts and stops HTTP and the engine."""

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from mlx_speculation.server.config import Settings
from mlx_speculation.server.engine_thread import MakeGenerator, Worker
from mlx_speculation.server.listener import POLL_SECONDS, Listener
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.routes import Api

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache

LOG = logging.getLogger("mlx_speculation.server")
# Time for the current round or prompt chunk to end; then for clients to read.
ENGINE_SECONDS, PARTING_SECONDS = 5.0, 2.0


class Server:
    """Serves one pair of models over HTTP.

        with Server(settings, make_generator) as server:
            print(server.url)

    Raises:
        InvalidRequestError: the address cannot be used.
        MissingLibraryError: prometheus-client is not installed.
    """

    worker: Worker  # the engine, set by `start`

    def __init__(
        self,
        settings: Settings,
        # Loads the models; called in the thread that will run them, with `prefixes`
        make_generator: MakeGenerator,
        *,
        # The prefix cache; None: every prompt is read as a whole
        prefixes: "PrefixCache | None" = None,
        host: str = "127.0.0.1",  # the address to listen at
        port: int = 0,  # 0: any free port
    ) -> None:
        self.metrics = Metrics(settings.names[0])
        self._ended = self._engine_ended = False
        self._api = Api(settings, self.metrics)
        self._listener = Listener(
            self._api.app(),
            settings.limits,
            self.metrics.refused,
            host=host,
            port=port,
        )
        self._make = partial(Worker, settings, self.metrics, make_generator, prefixes)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return self._listener.connections

    @property
    def url(self) -> str:
        """URL without a path."""
        return self._listener.url

    def start(self) -> None:
        """Load the models, and take requests.

        Raises:
            Exception: any error of loading the models.
        """
        self.worker = self._make()
        try:
            self.worker.loaded.result()
        except BaseException:
            self._listener.close(0.0)
            self.worker.end(PARTING_SECONDS)
            raise
        self._api.begin(self.worker)
        self._listener.start()

    def stop(self, grace: float = 0.0) -> bool:
        """Refuse new requests, and end. A second call does nothing.

        Args:
            grace: seconds for running requests to end. Those that have not ended by
                then are cut off, and their clients get an error.

        Returns:
            Whether the engine has ended. If it hangs, its thread goes on, and this
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
        self._listener.close(PARTING_SECONDS)
        if not self._engine_ended:
            LOG.error("the engine has not ended within %g seconds", ENGINE_SECONDS)
        return self._engine_ended

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
