"""Runs decoders without a stream, and checks that failed rounds change nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import pytest

from mlx_speculation.engine.draft_length.base import FixedDraftLength
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.decoder import StreamDecoder
from mlx_speculation.engine.round.outcome import RoundOutcome
from mlx_speculation.engine.round.request import Request
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Chooser, Verifier
from support.caches.contents import assert_same_content, content, counts
from support.identity import SAMPLED

PROMPT = [(5 * i * i + 3) % 256 for i in range(21)]
# An object, the name of its function, and the number of the call that fails, from 1.
Step = tuple[Any, str, int]


class InjectedError(Exception):
    """Error that the tests raise."""


class Run:
    """A decoder with a target lane; a test can set `cut` to change the outcomes."""

    def __init__(self, model: nn.Module, drafter: Any, length: int, most: int) -> None:
        self.sequence = Sequence(list(PROMPT))
        self.target, self.most = Lane(model), most
        self.cut: Callable[[RoundOutcome], RoundOutcome] = lambda outcome: outcome
        self.decoder = StreamDecoder(
            Request(
                target=self.target,
                sequence=self.sequence,
                verifier=Verifier(Chooser(SAMPLED, 256)),
                drafter=drafter,
                policy=FixedDraftLength(length),
            )
        )
        self.decoder.prefill.target()

    @property
    def emitted(self) -> list[int]:
        return self.sequence.tokens[len(PROMPT) :]

    def next_round(self) -> None:
        budget = self.most - len(self.emitted)
        self.decoder.next_round([budget], [lambda t: self.cut(t)])

    def finish(self) -> list[int]:
        while len(self.emitted) < self.most:
            self.next_round()
        return self.emitted

    def state(self) -> tuple[list[Any], dict[str, Any], list[int], int]:
        """Return the state that a failed round must not change."""
        return (
            content(self.target.caches),
            counts(self.decoder.request.statistics),
            list(self.sequence.tokens),
            self.target.seen,
        )

    def fail_one_round(self, step: Step, error: BaseException) -> None:
        """Let a step of the next round raise, and require an unchanged state."""
        owner, name, call = step
        with failing(self if owner is Run else owner, name, call, error):
            self.raises_and_changes_nothing(type(error))

    def raises_and_changes_nothing(self, error: type[BaseException]) -> None:
        before = self.state()
        with pytest.raises(error):
            self.next_round()
        after = self.state()
        assert_same_content(before[0], after[0])
        assert before[1:] == after[1:]


@contextmanager
def failing(owner: Any, name: str, call: int, error: BaseException) -> Iterator[None]:
    """Let the given call of a function raise before it acts."""
    original = getattr(owner, name)
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)
    assert calls >= call, f"{name} was called {calls} times, not {call}"


def label(value: Any) -> str | None:
    return f"{value[1]}-{value[2]}" if isinstance(value, tuple) else None
