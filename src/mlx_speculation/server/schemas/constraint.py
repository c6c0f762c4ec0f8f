"""One schema as a `Constraint` whose masks another process computes.

A place is computed once: the process keeps it under a number for as long as a state
here stands there. The token that leads to a place and the mask of it are one message
each way, which costs about 0.1 ms on a Linux CPU.
"""

import struct
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers.constraints.llguidance import failed_here

STEP = struct.Struct("<III")  # as in template_process, which cannot be imported here
MASK, FAILED = b"m", b"f"


class SchemaConstraint:
    """A schema that was compiled; see `Constraint`.

    Raises:
        ConstraintError: what may come first is not known.
    """

    def __init__(
        self,
        channel: Connection,  # to the process that has compiled it
        first: bytes,  # its answer: the place before the first token
        end: int,  # the number of token ids
        *,
        # After which a step is given up; the process ends itself before that
        seconds: float,
        # Called once, to end the process, with whether it was still needed; returns
        # what is wrong then
        leave: Callable[[bool], str],
    ) -> None:
        self._channel, self._end, self._seconds = channel, end, seconds
        self._leave = leave
        self._unused: deque[int] = deque()
        self._last = 0
        self._error: str | None = None
        self._lock = threading.Lock()
        self._first = self._place(0, first)

    def begin(self) -> "SchemaState":
        """Return a state before the first generated token."""
        return SchemaState(self, self._first)

    def close(self) -> None:
        """End the process. The second call does nothing."""
        with self._lock:
            if self._error is None:
                self._error = "The request has ended, and its schema with it."
                self._leave(False)

    def follow(self, place: int, token: int) -> "Place":
        """Return the place after a token.

        Raises:
            ConstraintError: a limit was hit, or the process has gone.
        """
        with self._lock:
            if self._error is not None:
                raise ConstraintError(self._error)
            self._last += 1
            return self._place(self._last, self._asked(place, token))

    def forget(self, place: int) -> None:
        """Free a place in the process with its next step."""
        self._unused.append(place)

    def _asked(self, place: int, token: int) -> bytes:
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        # A place is never forgotten before what follows it: its state asks here.
        message = STEP.pack(place, token, self._last)
        try:
            self._channel.send_bytes(message + struct.pack(f"<{len(unused)}I", *unused))
            if self._channel.poll(self._seconds):
                return self._channel.recv_bytes()
        except (OSError, EOFError):
            pass  # how it has ended says more
        self._error = self._leave(True)
        raise ConstraintError(self._error)

    def _place(self, number: int, answer: bytes) -> "Place":
        if answer[:1] == FAILED:
            self.forget(number)
            raise failed_here(answer[1:].decode())
        bits = np.frombuffer(answer, dtype=np.uint8, offset=2)
        # [ids], without the library's own end
        mask = np.unpackbits(bits, count=self._end, bitorder="little").view(np.bool_)
        return Place(self, number, mask, may_end=bool(answer[1]))


class Place:
    """A place that the process keeps until this is deleted."""

    def __init__(
        self,
        schema: SchemaConstraint,
        number: int,  # what the process knows it by
        mask: NDArray[np.bool_],  # which ids may come next, bool [ids]
        *,
        may_end: bool,  # whether the text may end here
    ) -> None:
        self._schema, self.number = schema, number
        self.mask, self.may_end = mask, may_end

    def __del__(self) -> None:
        """Free it in the process."""
        self._schema.forget(self.number)


class SchemaState:
    """A place in the text of a `SchemaConstraint`; see `ConstraintState`."""

    def __init__(self, schema: SchemaConstraint, place: Place) -> None:
        self._schema, self._place = schema, place

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next, bool [ids of the tokenizer]."""
        return self._place.mask

    @property
    def may_end(self) -> bool:
        """True if the text may end here."""
        return self._place.may_end

    def advance(self, token: int) -> None:
        """Go on by one token; see `ConstraintState`."""
        mask = self._place.mask
        if not (0 <= token < len(mask) and mask[token]):
            raise ConstraintError(
                f"Token {token} is not allowed here, and {int(mask.sum())} of the "
                f"tokenizer's {len(mask)} ids are. Take one that allowed() names."
            )
        self._place = self._schema.follow(self._place.number, token)

    def fork(self) -> "SchemaState":
        """Return a state at the same place."""
        return SchemaState(self._schema, self._place)
