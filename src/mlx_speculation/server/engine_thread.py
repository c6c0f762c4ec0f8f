"""The engine's thread: loads the models, takes requests, and runs rounds of them.

Everything of mlx happens here, loading included: arrays that one thread has not
computed yet cannot be computed by another.
"""

import atexit
import gc
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_speculation.engine import SpeculativeGenerator
from mlx_speculation.engine.options import GeneratorKeywords
from mlx_speculation.errors import InvalidRequestError, SpeculationError
from mlx_speculation.models.vision import VisionTarget
from mlx_speculation.server.api_errors import ApiError, invalid, unavailable
from mlx_speculation.server.batch_runner import Rows, logged_api_error
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job, Started
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.prompts.rendering import ChatTemplate, refused
from mlx_speculation.server.schemas import SchemaCompilers

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache

LOG = logging.getLogger("mlx_speculation.server")
IDLE_SECONDS, POLL_SECONDS = 0.1, 0.01
EXIT_SECONDS = 5.0  # until the thread of a program that ends has gone

MakeGenerator = Callable[["PrefixCache | None"], SpeculativeGenerator]


class Worker:
    """The engine of a server.

    Attributes:
        taken: requests that have not ended.
        loaded: done once the models are loaded; has what that has raised.
        template: of the chats, once the models are loaded.
        tokenizer: of the target.
        token_ids: how many ids it has.
    """

    template: ChatTemplate
    tokenizer: Any
    token_ids: int

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
        self.taken = 0
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._left_behind = False  # it hangs, and nobody waits for it
        self._rows: dict[tuple[str | None, bool], Rows] = {}  # by draft and exact
        self._generator: SpeculativeGenerator | None = None
        self.reads_images = False
        self.schemas = SchemaCompilers(settings.limits)
        self.loaded: Future[None] = Future()
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

        Also at the end of the program that has started it: Python waits for it there.
        """
        users = threading.main_thread(), self._starter
        return self._stop or not any(each.is_alive() for each in users)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a prompt and its text."""
        return self._longest

    def refuse(self, why: str) -> None:
        """Refuse new requests."""
        self._closed = why

    def take(self) -> None:
        """Count a request that is prepared, and has to be submitted or `done`.

        Raises:
            ApiError: there are too many, or the engine is not there.
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

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt that is no chat."""
        if self._generator is None:
            raise unavailable(self._closed or "The engine is not there.")
        return self._generator.encode(prompt)

    def submit(self, job: Job) -> None:
        """Queue an accepted request."""
        self._arrived.put(job)

    def done(self) -> None:
        """Count a request no more: it is answered, or was taken and not submitted."""
        with self._lock:
            self.taken = max(0, self.taken - 1)  # a leaving engine counts none

    def check_alive(self) -> None:
        """Raise where nobody would answer any more."""
        if not self.alive or self._left_behind:
            why = self._closed or "The engine has failed."
            raise unavailable(why, retry=None)

    def check_length(self, tokens: int, field: str) -> None:
        """Raise where a prompt does not fit.

        The words are those by which clients see that they have to shorten a history.
        """
        longest = self._settings.limits.prompt_tokens or sys.maxsize
        most = min(longest, self._longest - 1)  # and a token of the answer
        if tokens <= most:
            return
        option = "max-prompt-tokens" if most == longest else "max-model-len"
        more = f", or start the server with a larger --{option}"
        if most == self._positions - 1:
            more = f": the model has a table of {self._positions} positions"
        raise invalid(
            f"prompt is too long: {tokens} tokens > {most} maximum. Shorten it{more}.",
            field,
            code="context_length_exceeded",
        )

    def end(self, seconds: float) -> bool:
        """Ask the thread to end, and return whether it has.

        After Python's end of a thread mlx frees what it keeps for it, and asks for the
        interpreter's lock: a process that ends meanwhile aborts. So on Linux the end is
        that of the system's thread.
        """
        self.schemas.close()  # the thread may wait for a mask
        self._stop = True
        atexit.unregister(self.end)
        thread, until = self._thread, time.monotonic() + seconds
        thread.join(seconds)
        left = Path(f"/proc/self/task/{thread.native_id}")
        while not thread.is_alive() and left.exists() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        self._left_behind = thread.is_alive()
        return not self._left_behind

    def _run(self) -> None:
        """Load the models, then serve until `stopping`."""
        try:
            self._load()
        except BaseException as error:
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(None)
        try:
            while not self.stopping:
                self._admit()
                for rows in tuple(self._rows.values()):
                    rows.round()
                self._note_levels()
        except Exception:
            self._failed = True
            LOG.exception("the engine has failed")
        finally:
            self._leave()

    def _load(self) -> None:
        generator = self._make_generator(self._prefixes)
        self.tokenizer = generator.tokenizer
        args = self._settings.chat_template_args
        self.template = ChatTemplate(generator.tokenizer, args)
        self.reads_images = isinstance(generator.model, VisionTarget)
        rows = self._rows[None, False] = self._rows_of(generator)
        self._longest, self._positions = rows.longest, rows.positions
        self._generator, self._drafts_nothing = generator, generator.draft is None
        vocabulary = generator.tokenizer.get_vocab()
        self.token_ids = 1 + max(vocabulary.values(), default=0)
        self._note_levels()

    def _rows_of(self, generator: SpeculativeGenerator) -> Rows:
        return Rows(generator, self._settings, self._metrics, self.done)

    def _serving(self, draft: str | None, exact: bool) -> Rows:
        """Return the rows of a draft, in exact mode or not.

        Those that are not of the server's own draft and mode are made when they are
        first asked for.
        """
        generator = self._rows[None, False].generator
        if generator.exact is not None:
            exact = False  # all of them are
        if (draft, exact) not in self._rows:
            made = _beside(generator, draft, exact, self._prefixes)
            self._rows[draft, exact] = self._rows_of(made)
        return self._rows[draft, exact]

    def _admit(self) -> None:
        """Give a row to the next request; wait for one if there is nothing else to do.

        One for each round: those that run do not wait for many of them.
        """
        idle = not any(len(rows) for rows in self._rows.values())
        wait = IDLE_SECONDS if idle else 0.0
        admitted = False
        while not admitted:
            try:
                job = self._arrived.get(timeout=wait)
            except queue.Empty:
                return
            admitted = self._admitted(job)

    def _admitted(self, job: Job) -> bool:
        """Give a request a row; return whether it has got one."""
        try:
            if not job.cancelled:
                self._insert(job)
                return True
            self._metrics.cancelled()
        except Exception as error:
            job.put(logged_api_error(error))
        self.done()
        return False

    def _insert(self, job: Job) -> None:
        request = job.request
        draft = request.draft
        if draft is None and request.options.get("prediction") and self._drafts_nothing:
            draft = "lookup"
        rows = self._serving(draft, request.exact)
        chat = request.chat
        if chat is None or not chat.images:
            ids = job.prompt
            if not isinstance(request.prompt, list):  # a text, and no ids
                ids = rows.generator.replayed(ids)
            rows.insert(job, ids, len(ids))
        else:
            model: Any = rows.generator.model
            messages, args = self.template.with_images(chat)
            try:
                prompt = model.image_prompt(messages, chat.images, args)
            except Exception as error:  # a template raises what it likes
                raise refused(error) from error
            self.check_length(len(prompt.tokens), "messages")
            rows.insert(job, prompt, len(prompt.tokens))
        job.put(Started())

    def _leave(self) -> None:
        """End all rows, and let go of what this thread has made."""
        self._closed = self._closed or "The engine has failed."
        end = unavailable(self._closed)
        while not self._arrived.empty():
            self._arrived.get().put(end)
        for rows in self._rows.values():
            rows.end(end)
        self.taken = 0
        self._rows.clear()
        self._generator = None
        gc.collect()

    def _note_levels(self) -> None:
        running = sum(rows.running for rows in self._rows.values())
        cached = 0 if self._prefixes is None else self._prefixes.nbytes
        self._metrics.level(
            running=running,
            waiting=max(0, self.taken - running),
            cached=cached,
            active=mx.get_active_memory(),
        )


def _beside(
    generator: SpeculativeGenerator,
    draft: str | None,
    exact: bool,
    prefixes: "PrefixCache | None",
) -> SpeculativeGenerator:
    """Return a generator of the same target, with a draft or in a mode of its own.

    It shares the prefix cache, unless that holds the caches of a draft model too, or
    what forwards of another shape have computed.

    Raises:
        ApiError: the target cannot be decoded in exact mode.
    """
    options: GeneratorKeywords = {
        "draft": generator.draft if draft is None else draft,
        "draft_length": generator.draft_length if draft is None else None,
        "exact": exact or generator.exact or False,
    }
    make = partial(SpeculativeGenerator, generator.model, generator.tokenizer)
    if not exact:
        shared: GeneratorKeywords = {**options, "prefix_cache": prefixes}
        with suppress(InvalidRequestError):
            return make(**shared)
        return make(**options)
    try:
        return make(**options)
    except SpeculationError as error:
        raise invalid(str(error), "speculative.exact") from error
