"""One text on its way between its connection and the engine's thread.

connection                     engine
submit(job)          ->        queues it
job.next()           <-        `Started`, or what is wrong with it
job.next()           <-        `Read` and `Piece`, the last one with the result
job.cancel()         ->        removes the request before the next round
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.request import GenerationRequest

if TYPE_CHECKING:
    from mlx_speculation.engine import Result
    from mlx_speculation.samplers import Constraint
    from mlx_speculation.server.answer_parts import AnswerParser

LOG = logging.getLogger("mlx_speculation.server")
# The engine ends what is late between two rounds; after this long nobody waits for it.
OVERDUE_SECONDS = 10.0


class ClientLeftError(Exception):
    """Raised where a client has closed its connection before its answer was whole."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token id, and how probable it was."""

    id: int  # the token
    text: str  # of it, after the tokens before it
    value: float  # the natural logarithm of its probability


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer."""

    alternative: Alternative  # the token that was chosen
    top: tuple[Alternative, ...]  # the most probable ones
    start: int  # the characters of the text before it


@dataclass(frozen=True, slots=True)
class Started:
    """The request is valid, and queued."""


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of the prompt read so far."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one round."""

    texts: tuple[str, ...]  # of each token, each may be empty
    tokens: tuple[Token, ...] = ()  # all of them, if their probabilities were asked for
    result: "Result | None" = None  # the text as a whole, in the last piece


Event = Started | Read | Piece


class Job:
    """One text, to be answered within so many seconds."""

    parser: "AnswerParser"  # divides the answer, once the prompt is known

    def __init__(self, request: GenerationRequest, seconds: float) -> None:
        self.request = request
        self.prompt: list[int] = []  # of a text; images are read by the engine
        self.constraint: Constraint | None = None
        self.arrived = time.monotonic()
        self.deadline = self.arrived + seconds
        self.began: float | None = None  # the first token
        self.reading: float | None = None  # the first of the prompt was read
        self.prompt_tokens = self._read = 0
        self.alone: str | None = None  # why it does not run together with others
        self.cancelled = False  # whether nobody waits for the answer
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()

    @property
    def has_begun(self) -> bool:
        """True once a part of its prompt was read."""
        return self.began is not None or self._read > 0

    @property
    def late(self) -> bool:
        """True past the deadline."""
        return time.monotonic() > self.deadline

    def cancel(self) -> None:
        """Mark it for removal before the next round."""
        self.cancelled = True

    def count_prefill(self, tokens: int) -> None:
        """Note that so many more tokens of the prompt were read."""
        self.reading = self.reading or time.monotonic()
        self._read += tokens
        self.put(Read(self._read))

    def put(self, event: Event | Exception) -> None:
        """Hand over an event, or an error that ends the request, from any thread."""
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self, seconds: float, check: Any) -> Event | None:
        """Return the next event; None: there is none for so many seconds.

        Raises:
            ApiError: the request has ended, or the engine does not answer.
            Exception: raised by `check`, where waiting is of no use.
        """
        try:
            check()
        except ApiError:
            if self._events.empty():  # else its last event is read
                raise
        if time.monotonic() > self.deadline + OVERDUE_SECONDS:
            LOG.error("the engine does not answer")
            raise ApiError(504, "The engine does not answer.", code="timeout")
        try:
            async with asyncio.timeout(seconds):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event.with_traceback(None)  # one error may end many requests
        return event
