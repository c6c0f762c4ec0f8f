"""Jobs: each passes one text between its connection and the engine's thread.

connection                     engine
worker.arrived.put   ->        queues the request
job.next()           <-        the number 0, if the request is valid; or an error
job.next()           <-        numbers of prompt tokens read so far, then `Piece`s
job.cancel()         ->        removes the request before the next round
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlx_speculation.engine import Result
from mlx_speculation.samplers import Constraint, derived_seed
from mlx_speculation.server.answer_parts import AnswerParser
from mlx_speculation.server.api_errors import LOG, ApiError
from mlx_speculation.server.request.options import GenerationRequest

# Seconds that a connection waits beyond the limit of a request: the engine ends late
# requests between its rounds.
OVERDUE_SECONDS = 10.0
SAY_SECONDS = 30.0  # between lines about a prompt that is read


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer, or one that could stand in its place."""

    id: int
    text: str  # the text that this token adds to the text before
    logprob: float  # the natural logarithm of its probability
    top: tuple["Token", ...] = ()  # the most probable tokens in its place
    start: int = 0  # number of characters of the text before it


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one round."""

    texts: tuple[str, ...]  # one for each token; a text may be empty
    tokens: tuple[Token, ...] = ()  # all of the round, if probabilities were asked for
    result: Result | None = None  # of the whole text, in the last piece


Event = int | Piece


class Job:
    """Text number `index` of a request. It has to be complete within `seconds`."""

    parser: AnswerParser  # divides the answer; set once the prompt is known
    texts: Any = None  # `TokenTexts`, if probabilities are asked for
    result: Result  # set at the end, as is `stop_text`
    stop_text: str | None = None  # the stop text that has ended the text

    def __init__(
        self, request: GenerationRequest, seconds: float, index: int = 0
    ) -> None:
        self.request, self.sampling = request, request.sampling
        if self.sampling.seed is not None:
            seed = derived_seed(self.sampling.seed, index)
            self.sampling = replace(self.sampling, seed=seed)
        # The prompt of a completion, as text or token ids; None: the request is a chat
        self.given: Any = next(iter(request.prompts[index // request.count :]), None)
        self.images: tuple[Any, ...] = ()  # pictures of a chat
        self.prompt: list[int] = []  # token ids; empty for a chat with images
        self.constraint: Constraint | None = None
        self.arrived, self._seconds = time.monotonic(), seconds
        self.began: float | None = None  # time of the first token
        self.reading: float | None = None  # time when the first prompt tokens were read
        self._said = 0.0  # time of the last line about these
        self.prompt_tokens = self.read = 0  # prompt tokens; those read so far
        self.alone: str | None = None  # why its row is decoded alone; None: it is not
        self.cancelled = False  # True: nobody waits for the answer
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()

    @property
    def late(self) -> ApiError | None:
        """The error of a job that takes too long; None: it has time left."""
        seconds = self._seconds
        if time.monotonic() <= self.arrived + seconds:
            return None
        if self.reading or self.began:
            text = (
                f"The answer took more than {seconds:g} seconds. Ask for fewer tokens."
            )
            return ApiError(504, text, code="timeout", retry=False)
        text = f"The request has waited for {seconds:g} seconds. Try again later."
        return ApiError(503, text, code="queue_timeout", retry=True)

    @property
    def cut(self) -> bool:
        """True if a limit of length has ended the text."""
        return self.result.finish_reason == "length"

    def cancel(self) -> None:
        """Mark the job for removal before the next round."""
        self.cancelled = True

    def count_prefill(self, tokens: int) -> None:
        """Report that `tokens` more tokens of the prompt were read."""
        now = time.monotonic()
        if self.reading is None:
            self.reading = self._said = now
        self.read += tokens
        if now - self._said >= SAY_SECONDS:
            self._said = now
            LOG.info("%d of %d prompt tokens are read", self.read, self.prompt_tokens)
        self.put(self.read)

    def put(self, event: Event | Exception) -> None:
        """Pass on, from any thread, an event or an error that ends the request."""
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self, seconds: float, check: Callable[[], None]) -> Event | None:
        """Return the next event; None: none came within `seconds`.

        Raise the error that has ended the request, or the ApiError of `check`.
        """
        try:
            check()
        except ApiError:
            if self._events.empty():  # else waiting events come first
                raise
        if time.monotonic() > self.arrived + self._seconds + OVERDUE_SECONDS:
            LOG.error("the engine does not answer")
            raise ApiError(504, "The engine does not answer.", code="timeout")
        try:
            async with asyncio.timeout(seconds):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event.with_traceback(None)  # it may be raised in other jobs too
        return event
