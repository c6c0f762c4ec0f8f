"""The engine's thread: takes requests, runs rounds of all of them, hands out pieces.

Everything of mlx happens here, loading included: arrays that one thread has not
computed yet cannot be computed by another.
"""

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_speculation.engine import SpeculativeGenerator
from mlx_speculation.engine.batch import BatchGenerator
from mlx_speculation.engine.handling import Handling
from mlx_speculation.errors import InvalidRequestError
from mlx_speculation.models.mlx_lm_server import (
    EngineThread,
    Provider,
    options_of,
)
from mlx_speculation.samplers import Sampling
from mlx_speculation.server.jobs import Alternative, Job, Piece, Token
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.refusals import ApiError, as_api_error, invalid
from mlx_speculation.server.settings import Settings

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache
    from mlx_speculation.engine import Chunk, Result

LOG = logging.getLogger("mlx_speculation.server")
IDLE_SECONDS = 0.1

MakeGenerator = Callable[["PrefixCache | None"], SpeculativeGenerator]


@dataclass(slots=True)
class Rows:
    """The requests that one generator serves.

    Attributes:
        generator: of them all.
        batch: its rows.
        jobs: by the name of their row.
    """

    generator: SpeculativeGenerator
    batch: BatchGenerator
    jobs: dict[int, Job] = field(default_factory=dict)


class Worker(EngineThread):
    """The engine of a server.

    Args:
        settings: of the server.
        metrics: what is counted.
        make_generator: loads the models, in this thread.
        prefixes: what is kept between requests; None: nothing.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        make_generator: MakeGenerator,
        prefixes: "PrefixCache | None",
    ) -> None:
        self._settings, self._metrics = settings, metrics
        self._make_generator, self._prefixes = make_generator, prefixes
        self._arrived: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._taken = 0  # requests that are not answered yet
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._rows: dict[str | None, Rows] = {}
        self.loaded: Future[None] = Future()
        options = options_of(
            allowed_origins=list(settings.allowed_origins),
            chat_template_args=settings.chat_template_args,
        )
        super().__init__(Provider(options))

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._closed is None and self.loaded.done() and self.alive

    @property
    def taken(self) -> int:
        """Requests that were taken and have not ended."""
        return self._taken

    @property
    def busy(self) -> bool:
        """Whether there are any."""
        return self._taken > 0

    @property
    def rows_held(self) -> int:
        """Rows that wait or run, of all drafts."""
        each = (rows.batch for rows in tuple(self._rows.values()))
        return sum(len(batch.waiting) + len(batch.running) for batch in each)

    def refuse(self, why: str) -> None:
        """Take no more requests."""
        self._closed = why

    def submit(self, job: Job) -> None:
        """Take a request.

        Raises:
            ApiError: there are too many, or the engine is not there.
        """
        most = self._settings.max_rows + self._settings.limits.queue
        with self._lock:
            if not self.ready:
                why = self._closed or "The engine is not there."
                raise ApiError(503, why, code="unavailable", retry=True)
            if self._taken >= most:
                raise ApiError(
                    429,
                    f"{self._taken} requests are not answered yet, and {most} may be "
                    "taken. Try again later.",
                    code="queue_full",
                    retry=True,
                )
            self._taken += 1
        self._arrived.put(job)

    def check_alive(self) -> None:
        """Raise where nobody would answer any more."""
        if not self.alive:
            raise ApiError(503, "The engine has failed.", code="unavailable")

    def work(self) -> None:
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
                    self._round(rows)
                self._note_levels()
        finally:
            self._leave()

    def _load(self) -> None:
        generator = self._make_generator(self._prefixes)
        self.model_provider.hold(generator.model, generator.tokenizer)
        self._rows[None] = self._rows_of(generator)
        self._note_levels()

    def _rows_of(self, generator: SpeculativeGenerator) -> Rows:
        batch = BatchGenerator(generator, max_rows=self._settings.max_rows)
        return Rows(generator, batch)

    def _serving(self, draft: str | None) -> Rows:
        """Return the rows of a draft; those of lookups beside the own are made late."""
        if draft not in self._rows:
            own = self._rows[None].generator
            self._rows[draft] = self._rows_of(_beside(own, self._prefixes))
        return self._rows[draft]

    def _admit(self) -> None:
        """Give a row to the next request; wait for one if there is nothing else to do.

        One for each round: those that run wait for one prompt at most, and those that
        come together do not wait for the prompts of all.
        """
        wait = 0.0 if any(rows.jobs for rows in self._rows.values()) else IDLE_SECONDS
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
        except Exception as error:
            job.put(self._told(error))
        self._done()
        return False

    def _done(self) -> None:
        """Count a request that nobody has to answer any more."""
        with self._lock:
            self._taken -= 1

    def _insert(self, job: Job) -> None:
        asked = job.asked
        rows = self._serving(asked.draft)
        generator = rows.generator
        prompt, state = self._prompt(job, generator)
        most = self._settings.limits.prompt_tokens
        if len(prompt) > most:
            raise invalid(
                f"The prompt has {len(prompt)} tokens, and {most} may be.",
                "messages" if asked.chat else "prompt",
                code="context_length_exceeded",
            )
        if asked.schema is not None and state != "normal":
            raise invalid(
                "response_format was given, and the chat template lets the model think "
                "first. Switch that off, for example with chat_template_kwargs "
                '{"enable_thinking": false}.',
                "response_format",
            )
        uid = rows.batch.insert(prompt, **self._options(job, generator))
        rows.jobs[uid] = job
        if (reason := rows.batch.why_alone(uid)) is not None:
            self._metrics.alone(reason)
        job.prompt_tokens = len(prompt)
        job.put(self.context(prompt, state))

    def _prompt(
        self, job: Job, generator: SpeculativeGenerator
    ) -> tuple[list[int], str]:
        """Return token ids, and in what the answer begins."""
        if job.asked.prompt is not None:
            return generator.encode(job.asked.prompt), "normal"
        try:
            return self.rendered(job.request, job.asked.template_args)
        except Exception as error:  # a template raises what it likes
            raise invalid(
                f"The chat template refused the messages: {type(error).__name__}: "
                f"{str(error)[:200]}",
                "messages",
            ) from error

    def _options(self, job: Job, generator: SpeculativeGenerator) -> dict[str, Any]:
        """Return what a stream takes beside the prompt."""
        asked, tokenizer = job.asked, generator.tokenizer
        sampling = dict(asked.sampling)
        if sampling["xtc_probability"]:
            line = tokenizer.encode("\n", add_special_tokens=False)
            ends = [int(token) for token in (*line, *tokenizer.eos_token_ids)]
            sampling["xtc_special_tokens"] = ends
        length, fixed = asked.draft_length, generator.draft_length
        if length is not None and fixed is not None:
            length = min(length, fixed)
        return {
            "max_tokens": asked.max_tokens,
            "sampling": Sampling(**sampling),
            "stop": asked.stop,
            "draft_length": length,
            "logprobs": asked.logprobs,
            "constraint": _constraint(asked.schema, tokenizer),
            "handling": Handling(heard=job.heard),
        }

    def _round(self, rows: Rows) -> None:
        """Let go of what nobody waits for, and run a round of the rest."""
        for uid, job in tuple(rows.jobs.items()):
            if job.cancelled or job.late:
                self._remove(rows, uid)
        if not rows.jobs:
            return
        try:
            responses = rows.batch.next()
        except Exception as error:
            self._begin_anew(rows, error)
            return
        pieces: dict[int, list[Any]] = {}
        for one in responses:
            pieces.setdefault(one.uid, []).append(one)
        for uid, own in pieces.items():
            self._hand_out(rows, uid, own)

    def _hand_out(self, rows: Rows, uid: int, responses: list[Any]) -> None:
        """Give a request what one round has brought."""
        job, last = rows.jobs[uid], responses[-1]
        if job.began is None:
            job.began = time.monotonic()
            self._metrics.began(job.began - job.arrived)
        chunks = [one.chunk for one in responses if one.chunk is not None]
        text = "".join(chunk.text for chunk in chunks)
        token = chunks[-1].token if chunks else 0
        tokens = self._tokens(rows, chunks)
        result = None
        if last.finish_reason is not None:
            result = self._end(rows, uid)
        if last.error is not None:
            job.put(self._told(last.error))
        else:
            job.put(Piece(text, token, tokens, result))

    def _tokens(self, rows: Rows, chunks: "list[Chunk]") -> tuple[Token, ...]:
        """Return tokens as texts, if their probabilities were asked for."""
        decode = rows.generator.tokenizer.decode

        def named(token: int, value: float) -> Alternative:
            return Alternative(token, decode([token]), value)

        return tuple(
            Token(
                named(chunk.token, chunk.logprob.value),
                tuple(named(token, value) for token, value in chunk.logprob.top),
            )
            for chunk in chunks
            if chunk.logprob is not None
        )

    def _end(self, rows: Rows, uid: int) -> "Result":
        """Forget a row, and count it."""
        result = rows.batch.remove(uid)
        job = rows.jobs.pop(uid)
        self._done()
        read = job.prompt_tokens if job.began is not None else 0
        self._metrics.ended(result, read, time.monotonic() - job.arrived)
        return result

    def _remove(self, rows: Rows, uid: int) -> None:
        """End a row whose client has gone, or whose time is over."""
        job = rows.jobs[uid]
        seconds = f"{self._settings.limits.seconds:g} seconds"
        if job.cancelled:
            self._metrics.cancelled()
        elif job.began is None:
            job.put(
                ApiError(
                    503,
                    f"The request has waited for {seconds}. Try again later.",
                    code="queue_timeout",
                    retry=True,
                )
            )
        else:
            job.put(
                ApiError(
                    504,
                    f"The answer took more than {seconds}. Ask for fewer tokens.",
                    code="timeout",
                    retry=False,
                )
            )
        self._end(rows, uid)

    def _begin_anew(self, rows: Rows, error: Exception) -> None:
        """Answer all requests of a batch that has failed as a whole."""
        told = self._told(error)
        for uid, job in tuple(rows.jobs.items()):
            job.put(told)
            del rows.jobs[uid]
            self._done()
        rows.batch.close()
        rows.batch = BatchGenerator(rows.generator, max_rows=self._settings.max_rows)

    def _told(self, error: Exception) -> ApiError:
        """Return what a client learns of an exception; the log has the rest."""
        told = as_api_error(error)
        if told.status >= 500:
            LOG.error("a request failed", exc_info=error)
        return told

    def _leave(self) -> None:
        """End all rows, and let go of what this thread has made."""
        self._closed = self._closed or "The engine has failed."
        end = ApiError(503, self._closed, code="unavailable", retry=True)
        while not self._arrived.empty():
            self._arrived.get().put(end)
        for rows in self._rows.values():
            for job in rows.jobs.values():
                job.put(end)
            rows.jobs.clear()
            rows.batch.close()
        self._taken = 0
        self._rows.clear()
        gc.collect()

    def _note_levels(self) -> None:
        running = sum(len(rows.batch.running) for rows in self._rows.values())
        cached = 0 if self._prefixes is None else self._prefixes.nbytes
        self._metrics.level(
            running=running,
            waiting=max(0, self._taken - running),
            cached=cached,
            active=mx.get_active_memory(),
        )


def _beside(
    own: SpeculativeGenerator, prefixes: "PrefixCache | None"
) -> SpeculativeGenerator:
    """Return a generator of the same target that drafts by lookups.

    It shares the prefix cache, unless that holds the caches of a draft model too.
    """
    try:
        return SpeculativeGenerator(
            own.model, own.tokenizer, draft="lookup", prefix_cache=prefixes
        )
    except InvalidRequestError:
        return SpeculativeGenerator(own.model, own.tokenizer, draft="lookup")


def _constraint(schema: dict[str, Any] | None, tokenizer: Any) -> Any:
    if schema is None:
        return None
    from mlx_speculation.models import json_schema

    # Small models write whitespace without end where they may.
    return json_schema(schema, tokenizer, compact=True)
