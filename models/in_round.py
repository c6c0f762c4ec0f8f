"""Whether a forward is one of a round, in this thread.

A round's forward is over a few rows, and is not the one that reads a prompt: some
layers have a better way for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_in_round: ContextVar[bool] = ContextVar("in_round", default=False)

in_round = _in_round.get


@contextmanager
def rows_of_a_round() -> Iterator[None]:
    """Let layers take their ways for a few rows, in this thread, inside the block."""
    token = _in_round.set(True)
    try:
        yield
    finally:
        _in_round.reset(token)
