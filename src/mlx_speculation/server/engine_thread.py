"""The engine's thread: loads the models, takes requests, and runs rounds of them.

Only the thread that has made an mlx array can compute it, so this thread loads, too.
"""

import atexit
import gc
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_speculation import PrefixCache
from mlx_speculation.engine import SpeculativeGenerator
from mlx_speculation.engine.options import GeneratorKeywords
from mlx_speculation.errors import InvalidRequestError, SpeculationError
from mlx_speculation.server.api_errors import (
    LOG,
    ApiError,
    as_api_error,
    invalid,
    unavailable,
)
from mlx_speculation.server.batch_runner import Rows
from mlx_speculation.server.chat_prompts import ChatTemplate, refused
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.schemas.compilers import SchemaCompilers

IDLE_SECONDS, POLL_SECONDS = 0.1, 0.01
FAILED = "The engine has failed."
EXIT_SECONDS = 60.0  # for the thread to end when the program exits

MakeGenerator = Callable[[PrefixCache | None], SpeculativeGenerator]


class Worker:
    """The engine of a server; each draft and mode (exact or not) has its own `Rows`.

    Of what its thread makes, other threads may use only `main` and `template`.
    """

    template: ChatTemplate  # set when the models are loaded

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        make_generator: MakeGenerator,
        prefixes: PrefixCache | None,
    ) -> None:
        group = mx.distributed.init()
        if group.size() > 1:
            raise InvalidRequestError(
                f"The server runs in 1 process, and this is rank {group.rank()} of "
                f"{group.size()}. Start it without mlx.launch."
            )
        self._settings, self._metrics = settings, metrics
        self._make_generator, self._prefixes = make_generator, prefixes
        metrics.watch("num_requests_running", lambda: self.running)
        metrics.watch("num_requests_waiting", lambda: max(0, self.taken - self.running))
        metrics.watch("active_memory_bytes", mx.get_active_memory)
        if prefixes is not None:
            points = "prefix_cache_restore_points"
            metrics.watch(points, lambda: prefixes.restore_points)
            metrics.watch("prefix_cache_bytes", lambda: prefixes.nbytes)
            metrics.watch("prefix_cache_evictions", lambda: prefixes.evictions)
        self._rows: dict[tuple[str | None, bool], Rows] = {}
        self._rows_of = partial(
            Rows, settings=settings, metrics=metrics, done=self.done
        )
        self.arrived: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.taken = 0  # requests that have not ended
        self._lock = threading.Lock()
        self.closed: str | None = None  # why requests are refused; None: they are not
        self.schemas = SchemaCompilers(settings.limits)
        self.loaded: Future[None] = Future()  # done once loaded, or has the error
        self._stop = False
        self._hangs = False  # whether the thread has not ended in time
        atexit.register(self.end, EXIT_SECONDS)
        # A daemon thread: Python waits for non-daemon threads before it calls `end`.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread can answer."""
        return self._thread.is_alive() and not self._hangs

    @property
    def running(self) -> int:
        """Number of rows that have begun."""
        return sum(rows.running for rows in tuple(self._rows.values()))

    @property
    def main(self) -> Rows:
        """The rows of requests that choose no draft or mode.

        Raise ApiError if the engine has ended.
        """
        try:
            return self._rows[None, False]
        except KeyError as error:
            raise unavailable(self.closed or FAILED) from error

    def take(self) -> None:
        """Count a new request. The caller then puts it in `arrived`, or calls `done`.

        Raise ApiError if there are too many requests, or if `closed` is set.
        """
        most = self._settings.max_rows + self._settings.limits.queue
        with self._lock:
            if self.closed is not None:
                raise unavailable(self.closed)
            if self.taken >= most:
                raise ApiError(
                    429,
                    f"{self.taken} requests run or wait; at most {most} are allowed. "
                    "Try again later.",
                    code="queue_full",
                    retry=True,
                )
            self.taken += 1

    def done(self) -> None:
        """Stop counting a request that has ended, or is not submitted after `take`."""
        with self._lock:
            self.taken -= 1

    def check_alive(self) -> None:
        """Raise if the engine cannot answer any more."""
        if not self.alive:
            raise unavailable(self.closed or FAILED, retry=None)

    def end(self, seconds: float) -> bool:
        """Ask the thread to end, and return whether it has ended.

        mlx frees data after a Python thread has ended, and a process that exits
        meanwhile aborts. So on Linux this method waits until /proc has no such thread.
        """
        self.schemas.close()  # the thread may be waiting for a mask
        self._stop = True
        atexit.unregister(self.end)
        thread, until = self._thread, time.monotonic() + seconds
        thread.join(seconds)
        left = Path(f"/proc/self/task/{thread.native_id}")
        while not thread.is_alive() and left.exists() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        self._hangs = thread.is_alive()
        return not self._hangs

    def _run(self) -> None:
        try:
            rows = self._rows_of(self._make_generator(self._prefixes))
            self._rows[None, False] = rows
            args = self._settings.chat_template_args
            self.template = ChatTemplate(rows.generator.tokenizer, args)
        except BaseException as error:
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(None)
        try:
            while not self._stop:
                self._admit()
                for rows in tuple(self._rows.values()):
                    rows.round()
        except Exception:
            LOG.exception("the engine has failed")
        finally:
            self._leave()

    def _admit(self) -> None:
        """Insert the next request; wait for one if no request runs.

        Only one is inserted before each round, since insertions delay running requests.
        """
        wait = 0.0 if any(map(len, self._rows.values())) else IDLE_SECONDS
        while True:
            try:
                job = self.arrived.get(timeout=wait)
            except queue.Empty:
                return
            try:
                if not job.cancelled:
                    self._insert(job)
                    job.put(0)
                    return
                self._metrics.add("requests_cancelled")
            except Exception as error:
                job.put(as_api_error(error))
            self.done()

    def _insert(self, job: Job) -> None:
        request, main = job.request, self.main.generator
        draft = request.draft
        if draft is None and request.options.get("prediction") and main.draft is None:
            draft = "lookup"
        # If the main generator is in exact mode, all generators are.
        key = draft, request.exact and main.exact is None
        if key not in self._rows:
            self._rows[key] = self._rows_of(_beside(main, *key, self._prefixes))
        rows, ids = self._rows[key], job.prompt
        if request.chat is None or not job.images:
            if not isinstance(job.given, list):  # the prompt is text
                ids = rows.generator.replayed(ids)
            rows.insert(job, ids, len(ids))
            return
        model: Any = rows.generator.model
        messages, args = self.template.fit(request.chat)
        try:
            prompt = model.image_prompt(messages, job.images, args)
        except Exception as error:  # a template may raise any error
            raise refused(error) from error
        rows.check_length(len(prompt.tokens), "messages")
        rows.insert(job, prompt, len(prompt.tokens))

    def _leave(self) -> None:
        """End all requests, and free the arrays of this thread."""
        self.closed = self.closed or FAILED
        end = unavailable(self.closed)
        while not self.arrived.empty():
            self.arrived.get().put(end)
            self.done()
        for rows in self._rows.values():
            rows.end(end)
        self._rows.clear()
        gc.collect()


def _beside(
    generator: SpeculativeGenerator,
    draft: str | None,
    exact: bool,
    prefixes: PrefixCache | None,
) -> SpeculativeGenerator:
    """Return a generator of the same target, with another draft or mode.

    A prefix cache is not shared if it holds caches of a draft model, nor in exact mode:
    forwards of other shapes have filled it.
    """
    options: GeneratorKeywords = {
        "draft": generator.draft if draft is None else draft,
        "draft_length": generator.draft_length if draft is None else None,
        "exact": exact or generator.exact or False,
    }
    make = partial(
        SpeculativeGenerator, generator.model, generator.tokenizer, **options
    )
    if not exact:
        with suppress(InvalidRequestError):
            return make(prefix_cache=prefixes)
    try:
        return make()
    except SpeculationError as error:
        field = "exact" if exact else "draft"
        raise invalid(str(error), f"speculative.{field}") from error
