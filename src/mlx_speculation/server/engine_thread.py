"""The engine's thread: loads the models, takes requests, and runs rounds of them.

Everything of mlx happens here, loading included: arrays that one thread has not
computed yet cannot be computed by another.
"""

import gc
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_speculation.engine import SpeculativeGenerator
from mlx_speculation.errors import InvalidRequestError, SpeculationError
from mlx_speculation.models.vision import ImagePrompt, VisionTarget
from mlx_speculation.server.api_errors import ApiError, invalid, unavailable
from mlx_speculation.server.batch_runner import Rows, logged_api_error
from mlx_speculation.server.config import Settings
from mlx_speculation.server.job import Job
from mlx_speculation.server.metrics import Metrics
from mlx_speculation.server.mlx_lm_server import (
    EngineThread,
    Provider,
    options_of,
)
from mlx_speculation.server.request import CheckedRequest, opened
from mlx_speculation.server.schemas import SchemaCompilers

if TYPE_CHECKING:
    from mlx_speculation import PrefixCache

IDLE_SECONDS = 0.1

MakeGenerator = Callable[["PrefixCache | None"], SpeculativeGenerator]


class Worker(EngineThread):
    """The engine of a server."""

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
        self.taken = 0  # requests that have not ended
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._left_behind = False  # it hangs, and nobody waits for it
        self._rows: dict[tuple[str | None, bool], Rows] = {}  # by draft and exact
        self.schemas = SchemaCompilers(settings.limits)
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
    def reads_images(self) -> bool:
        """Whether the target reads images."""
        return isinstance(self.model_provider.model, VisionTarget)

    def refuse(self, why: str) -> None:
        """Take no more requests."""
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

    def with_pictures(self, checked: CheckedRequest) -> CheckedRequest:
        """Return a request whose images are opened; the caller's thread decodes them.

        Raises:
            ApiError: an image is none.
        """
        if not checked.images:
            return checked
        return replace(checked, images=opened(checked.images, self._settings))

    def submit(self, job: Job) -> None:
        """Let the engine answer a request that was taken."""
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

    def end(self, seconds: float) -> bool:
        """Ask the thread to end, and return whether it has."""
        self.schemas.close()  # the thread may wait for a mask
        ended = super().end(seconds)
        self._left_behind = not ended
        return ended

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
                    rows.round()
                self._note_levels()
        finally:
            self._leave()

    def _load(self) -> None:
        generator = self._make_generator(self._prefixes)
        self.model_provider.hold(generator.model, generator.tokenizer)
        self._rows[None, False] = self._rows_of(generator)
        self._note_levels()

    def _rows_of(self, generator: SpeculativeGenerator) -> Rows:
        return Rows(generator, self._settings, self._metrics, self.done)

    def _serving(self, draft: str | None, exact: bool) -> Rows:
        """Return the rows of a draft, in exact mode or not.

        Those that are not of the server's own draft and mode are made when they are
        first asked for.
        """
        own = self._rows[None, False].generator
        if own.exact is not None:
            exact = False  # all of them are
        if (draft, exact) not in self._rows:
            made = _beside(own, draft, exact, self._prefixes)
            self._rows[draft, exact] = self._rows_of(made)
        return self._rows[draft, exact]

    def _admit(self) -> None:
        """Give a row to the next request; wait for one if there is nothing else to do.

        One for each round: chats are rendered here, and those that run do not wait for
        many of them.
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
        checked = job.checked
        rows = self._serving(checked.draft, checked.exact)
        prompt, state = self._prompt(job, rows.generator)
        tokens = prompt.tokens if isinstance(prompt, ImagePrompt) else prompt
        limits, longest = self._settings.limits, rows.longest
        most = min(limits.prompt_tokens, longest - 1)  # and a token of the answer
        if len(tokens) > most:
            own = most == limits.prompt_tokens
            option = "max-prompt-tokens" if own else "max-model-len"
            more = f", or start the server with a larger --{option}"
            if most == rows.positions - 1:
                more = f": the model has a table of {rows.positions} positions"
            raise invalid(
                f"The prompt has {len(tokens)} tokens, and {most} may be. Shorten it"
                f"{more}.",
                "messages" if checked.chat else "prompt",
                code="context_length_exceeded",
            )
        if job.constraint is not None and state != "normal":
            field = "tool_choice" if checked.calls else "response_format"
            raise invalid(
                f"{field} was given, and the chat template lets the model think "
                "first. Switch that off, for example with chat_template_kwargs "
                '{"enable_thinking": false}.',
                field,
            )
        rows.insert(job, prompt, len(tokens))
        job.put(self.answer_parser(job.request, state, checked.most_calls))

    def _prompt(
        self, job: Job, generator: SpeculativeGenerator
    ) -> tuple[list[int] | ImagePrompt, str]:
        """Return token ids, and in what the answer begins."""
        checked = job.checked
        if checked.prompt is not None:
            return generator.encode(checked.prompt), "normal"
        try:
            tokens, state = self.rendered(job.request, checked.template_args)
            if not checked.images:
                return tokens, state
            return self._image_prompt(checked, generator.model), state
        except InvalidRequestError as error:
            raise invalid(str(error), "messages") from error
        except Exception as error:  # a template raises what it likes
            raise invalid(
                f"The chat template refused the messages: {type(error).__name__}: "
                f"{str(error)[:200]}",
                "messages",
            ) from error

    def _image_prompt(self, checked: CheckedRequest, model: Any) -> ImagePrompt:
        """Return what the processor makes of a chat with images."""
        template = {
            **self._settings.chat_template_args,
            **(checked.template_args or {}),
        }
        if checked.body["tools"] is not None:
            template["tools"] = checked.body["tools"]
        made: ImagePrompt = model.image_prompt(checked.placed, checked.images, template)
        return made

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
    own: SpeculativeGenerator,
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
    options: dict[str, Any] = {
        "draft": own.draft if draft is None else draft,
        "draft_length": own.draft_length if draft is None else None,
        "exact": exact or own.exact or False,
    }
    if not exact:
        try:
            return SpeculativeGenerator(
                own.model, own.tokenizer, prefix_cache=prefixes, **options
            )
        except InvalidRequestError:
            return SpeculativeGenerator(own.model, own.tokenizer, **options)
    try:
        return SpeculativeGenerator(own.model, own.tokenizer, **options)
    except SpeculationError as error:
        raise invalid(str(error), "speculative.exact") from error
