"""One request on its way between its connection and the engine's thread.

connection                     engine
submit(job)          ->        takes it, and gives it a context
job.wait()           <-        or what is wrong with it
job.pieces           <-        a piece for each round, the last with the result
job.cancel()         ->        removes the row before the next round
"""

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_speculation.server.api_errors import ApiError
from mlx_speculation.server.request import CheckedRequest

if TYPE_CHECKING:
    from mlx_speculation.engine import Result
    from mlx_speculation.samplers import Constraint

POLL_SECONDS = 0.1
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

    @property
    def text(self) -> str:
        """Its text."""
        return self.alternative.text


@dataclass(frozen=True, slots=True)
class Piece:
    """What one round has added to a text."""

    text: str  # may be empty
    tokens: tuple[Token, ...] = ()  # all of them, if their probabilities were asked for
    result: "Result | None" = None  # the text as a whole, in the last piece


@dataclass(frozen=True, slots=True)
class Read:
    """How many tokens of the prompt were read so far."""

    tokens: int


class Job:
    """One request, to be answered within so many seconds.

    Attributes:
        cancelled: whether nobody waits for the answer.
    """

    def __init__(self, checked: CheckedRequest, request: Any, seconds: float) -> None:
        self.checked, self.request = checked, request
        self.constraint: Constraint | None = None
        self.arrived = time.monotonic()
        self.deadline = self.arrived + seconds
        self.began: float | None = None
        self.prompt_tokens = self._read = 0
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cancelled = False

    @property
    def has_begun(self) -> bool:
        """Whether it has had its turn: its prompt was read, or a part of it."""
        return self.began is not None or self._read > 0

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.deadline

    def cancel(self) -> None:
        """Let the engine remove it before the next round."""
        self.cancelled = True

    def count_prefill(self, tokens: int) -> None:
        """Note that so many more tokens of the prompt were read."""
        self._read += tokens
        self.put(Read(self._read))

    def put(self, event: Any) -> None:
        """Hand over a context, a piece, or an `ApiError` that ends the request."""
        self._events.put(event)

    def pieces(self, alive: Callable[[], None]) -> Iterator[Piece | Read]:
        """Yield the answer; see `wait`."""
        while True:
            event = self.wait(alive)
            yield event
            if isinstance(event, Piece) and event.result is not None:
                return

    def wait(self, alive: Callable[[], None]) -> Any:
        """Return what comes next: first what mlx-lm's server has to know of the prompt.

        Args:
            alive: called now and then; raises when waiting is of no use.

        Raises:
            ApiError: the request has ended, or the engine does not answer.
        """
        while True:
            try:
                alive()
            except ApiError:
                if self._events.empty():  # else its last event is read
                    raise
            if time.monotonic() > self.deadline + OVERDUE_SECONDS:
                raise ApiError(504, "The engine does not answer.", code="timeout")
            try:
                event = self._events.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, ApiError):
                raise event
            return event
