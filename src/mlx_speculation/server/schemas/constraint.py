"""A schema as a `Constraint` whose masks a child process computes.

The child has one matcher of llguidance, which has consumed the tokens of one state. For
the mask of another state it rolls back to the states' common prefix, then consumes the
rest. A mask takes one message each way, about 0.1 ms on a Linux CPU.
"""

import json
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from mlx_speculation.errors import ConstraintError
from mlx_speculation.samplers.constraints.llguidance import failed_here
from mlx_speculation.server.schemas.template_process import FAILED


class SchemaConstraint:
    """A compiled schema; see `Constraint`.

    Raises:
        ConstraintError: llguidance failed on the mask of the first token.
    """

    def __init__(
        self,
        channel: Connection,  # to the child that has compiled the schema
        first: bytes,  # the child's answer: the mask of the first token
        end: int,  # the number of token ids
        *,
        # Time to wait for a mask; longer than the child's own limit
        seconds: float,
        # Ends the child; called once. The argument says whether the child was still
        # needed. If it was, the result is an error message, else an empty text
        leave: Callable[[bool], str],
    ) -> None:
        self._channel, self._end, self._seconds = channel, end, seconds
        self._leave = leave
        self._path: tuple[int, ...] = ()  # tokens that the matcher has consumed
        self._error: str | None = None
        self._lock = threading.Lock()
        self._first = self._mask(first)

    def begin(self) -> "SchemaState":
        """Return a state before the first generated token."""
        return SchemaState(self, (), *self._first)

    def close(self) -> None:
        """End the child. A second call does nothing."""
        with self._lock:
            if self._error is None:
                self._error = "The request has ended, and its schema with it."
                self._leave(False)

    def after(self, path: tuple[int, ...]) -> tuple[NDArray[np.bool_], bool]:
        """Return which ids may follow `path`, bool [ids], and whether the text may end.

        Raises:
            ConstraintError: a limit was hit, or the child has ended.
        """
        with self._lock:
            if self._error is not None:
                raise ConstraintError(self._error)
            return self._mask(self._asked(path))

    def _asked(self, path: tuple[int, ...]) -> bytes:
        kept = min(len(self._path), len(path))
        while self._path[:kept] != path[:kept]:
            kept -= 1
        step = [len(self._path) - kept, *path[kept:]]
        self._path = path
        try:
            self._channel.send_bytes(json.dumps(step).encode())
            if self._channel.poll(self._seconds):
                return self._channel.recv_bytes()
        except (OSError, EOFError):
            pass  # the exit status gives the reason
        self._error = self._leave(True)
        raise ConstraintError(self._error)

    def _mask(self, answer: bytes) -> tuple[NDArray[np.bool_], bool]:
        if answer[:1] == FAILED:
            self._path = ()
            raise failed_here(answer[1:].decode())
        bits = np.frombuffer(answer, dtype=np.uint8, offset=2)
        # [ids], without the id that llguidance has for the end of a text
        mask = np.unpackbits(bits, count=self._end, bitorder="little").view(np.bool_)
        return mask, bool(answer[1])


class SchemaState:
    """The state of one text under a `SchemaConstraint`; see `ConstraintState`."""

    def __init__(
        self,
        schema: SchemaConstraint,
        path: tuple[int, ...],  # the tokens of the text so far
        mask: NDArray[np.bool_],  # which ids may come next, bool [ids]
        may_end: bool,
    ) -> None:
        self._schema, self._path = schema, path
        self._mask, self.may_end = mask, may_end

    def allowed(self) -> NDArray[np.bool_]:
        """Return which token ids may come next, bool [ids of the tokenizer]."""
        return self._mask

    def advance(self, token: int) -> None:
        """Append a token to the text; see `ConstraintState`."""
        mask = self._mask
        if not (0 <= token < len(mask) and mask[token]):
            raise ConstraintError(
                f"Token {token} is not allowed here; only {int(mask.sum())} of the "
                f"tokenizer's {len(mask)} ids are. Take one that allowed() names."
            )
        path = (*self._path, token)
        self._mask, self.may_end = self._schema.after(path)
        self._path = path

    def fork(self) -> "SchemaState":
        """Return an independent state at the same position of the text."""
        return SchemaState(self._schema, self._path, self._mask, self.may_end)
