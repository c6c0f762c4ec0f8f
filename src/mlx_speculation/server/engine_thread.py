"""The engine's thread: loads the models, takes requests, and runs rounds of them.

All of mlx runs in this thread, loading included: an array that is not computed yet
cannot be computed by another thread than the one that made it.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_speculation.engine import SpeculativeGenerator
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.server.api_errors import ApiError, unavailable
from mlx_speculation.server.batch_runner import logged_api_error
from mlx_speculation.server.config import Settings
from mlx_speculation.server.generators import Generators
from mlx_speculation.server.job import Job, Started
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.schemas import SchemaCompilers

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache

LOG = logging.getLogger("mlx_speculation.server")
IDLE_SECONDS, POLL_SECONDS = 0.1, 0.01
EXIT_SECONDS = 5.0  # for the thread to end when the program exits

MakeGenerator = Callable[["PrefixCache | None"], SpeculativeGenerator]


class Worker:
    """The engine of a server."""

    _generators: Generators

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        make_generator: MakeGenerator,
        prefixes: "PrefixCache | None",
    ) -> None:
        group = mx.distributed.init()
        if group.size() > 1:
            raise InvalidRequestError(
                f"The server runs in 1 process, and this is rank {group.rank()} of "
                f"{group.size()}. Start it without mlx.launch."
            )
        self._settings, self._metrics = settings, metrics
        self._make_generator, self._prefixes = make_generator, prefixes
        if prefixes is not None:
            metrics.watch(prefixes)
        self._arrived: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.taken = 0  # requests that have not ended
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._abandoned = False  # the thread hangs, and no call waits for it
        self.schemas = SchemaCompilers(settings.limits)
        self.loaded: Future[Generators] = Future()  # or the error of loading
        self._stop = self._failed = False
        self._starter = threading.current_thread()
        atexit.register(self.end, EXIT_SECONDS)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """True if requests are accepted."""
        return self._closed is None and self.loaded.done() and self.alive

    @property
    def alive(self) -> bool:
        """True while the thread runs and has not failed."""
        return self._thread.is_alive() and not self._failed

    @property
    def stopping(self) -> bool:
        """True if the thread has to end.

        Also if the program exits, since Python then waits for this thread.
        """
        users = threading.main_thread(), self._starter
        return self._stop or not any(each.is_alive() for each in users)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a prompt and its text."""
        return self._generators.longest

    def refuse(self, why: str) -> None:
        """Refuse new requests."""
        self._closed = why

    def take(self) -> None:
        """Count a new request, which the caller has to `submit`, or to end by `done`.

        Raises:
            ApiError: there are too many requests, or the engine does not run.
        """
        most = self._settings.max_rows + self._settings.limits.queue
        with self._lock:
            if not self.ready:
                why = self._closed or "The engine is not there."
                raise unavailable(why)
            if self.taken >= most:
                raise ApiError(
                    429,
                    f"{self.taken} requests are not answered yet, and {most} may be "
                    "taken. Try again later.",
                    code="queue_full",
                    retry=True,
                )
            self.taken += 1

    def submit(self, job: Job) -> None:
        """Queue an accepted request."""
        self._arrived.put(job)

    def done(self) -> None:
        """Count a request no more: it has ended, or is not submitted after `take`."""
        with self._lock:
            self.taken = max(0, self.taken - 1)  # `_leave` sets it to 0

    def check_alive(self) -> None:
        """Raise if the engine cannot answer any more."""
        if not self.alive or self._abandoned:
            why = self._closed or "The engine has failed."
            raise unavailable(why, retry=None)

    def end(self, seconds: float) -> bool:
        """Ask the thread to end, and return whether it has.

        When a Python thread has ended, mlx still frees its data of that thread, and
        takes the interpreter's lock for this. A process that exits meanwhile aborts, so
        on Linux this waits for the end of the system's thread.
        """
        self.schemas.close()  # the thread may wait for a mask
        self._stop = True
        atexit.unregister(self.end)
        thread, until = self._thread, time.monotonic() + seconds
        thread.join(seconds)
        left = Path(f"/proc/self/task/{thread.native_id}")
        while not thread.is_alive() and left.exists() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        self._abandoned = thread.is_alive()
        return not self._abandoned

    def _run(self) -> None:
        """Load the models, then serve until `stopping`."""
        try:
            self._generators = Generators(
                self._make_generator(self._prefixes),
                self._settings,
                self._metrics,
                self._prefixes,
                self.done,
            )
            self._note_levels()
        except BaseException as error:
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(self._generators)
        try:
            while not self.stopping:
                self._admit()
                self._generators.round()
                self._note_levels()
        except Exception:
            self._failed = True
            LOG.exception("the engine has failed")
        finally:
            self._leave()

    def _admit(self) -> None:
        """Insert the next request; wait for one if no request runs.

        At most one before each round, so that running requests do not wait for many.
        """
        wait = 0.0 if self._generators else IDLE_SECONDS
        while True:
            try:
                job = self._arrived.get(timeout=wait)
            except queue.Empty:
                return
            try:
                if not job.cancelled:
                    self._generators.insert(job)
                    job.put(Started())
                    return
                self._metrics.cancelled()
            except Exception as error:
                job.put(logged_api_error(error))
            self.done()

    def _leave(self) -> None:
        """End all requests, and free the arrays of this thread."""
        self._closed = self._closed or "The engine has failed."
        end = unavailable(self._closed)
        while not self._arrived.empty():
            self._arrived.get().put(end)
        self._generators.end(end)
        self.taken = 0

    def _note_levels(self) -> None:
        running = self._generators.running
        self._metrics.level(
            running=running,
            waiting=max(0, self.taken - running),
            cached=0 if self._prefixes is None else self._prefixes.nbytes,
            active=mx.get_active_memory(),
        )
