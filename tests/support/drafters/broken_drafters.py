"""Drafters that break their contract at a given call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.drafters.draft_model import LONGEST_LAG
from mlx_speculation.models import LaneRound
from mlx_speculation.models.checkpoints import HeadOutput
from mlx_speculation.models.mtp import Mtp

CALLS = ("begin", "propose", "settle", "discard")
RAISES = ("before", "after")
# Faulty results of propose(), made from the draft and the limit.
WRONG: dict[str, Callable[[Proposal, int], Any]] = {
    "too many": lambda draft, limit: Proposal(mx.zeros((limit + 1,), mx.uint32)),
    "negative": lambda draft, limit: _said(draft, limit, -3),
    "huge": lambda draft, limit: _said(draft, limit, 10**6),
    "first past the end": lambda draft, limit: _said(draft, limit, 256),
    "nothing": lambda draft, limit: None,
    "floats": lambda draft, limit: Proposal(mx.zeros((limit,))),
    "a matrix": lambda draft, limit: Proposal(mx.zeros((1, limit), mx.uint32)),
    "a list": lambda draft, limit: Proposal([1, 2]),  # type: ignore[arg-type]
}


class BrokenError(Exception):
    """Error of broken drafters."""


@dataclass(slots=True)
class Happened:
    """Numbers of faults that have happened, and of calls after them."""

    faults: int = 0
    later: int = 0  # calls after the fault, except discard


def _said(draft: Proposal, limit: int, token: int) -> Proposal:
    """Lengthen a draft to the limit, with `token` as its last id.

    A draft of one token would be dropped while a plain step is in flight.
    """
    said = [*draft.tokens.tolist(), *[0] * limit][: limit - 1]  # type: ignore[misc]
    return replace(draft, tokens=mx.array([*said, token], mx.int32))


@contextmanager
def broken(
    owner: type, call: str, nth: int, how: str, error: BaseException | None = None
) -> Iterator[Happened]:
    """Let the nth call of a drafter's method, counted from 1, go wrong.

    If `how` is one of `RAISES`, the call raises before or after it acts. If it is a key
    of `WRONG`, `call` must be "propose", and the call returns that faulty result.
    """
    happened, calls = Happened(), 0
    originals = {name: getattr(owner, name) for name in CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        def method(*args: Any) -> Any:
            nonlocal calls
            happened.later += happened.faults > 0 and name != "discard"
            calls += name == call
            if name != call or calls != nth:
                return originals[name](*args)
            happened.faults += 1
            if how != "before":
                result = originals[name](*args)
            if how in RAISES:
                raise BrokenError if error is None else error
            return WRONG[how](result, args[2])

        return method

    for name in CALLS:
        setattr(owner, name, wrapped(name))
    try:
        yield happened
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


@contextmanager
def nan_logits(draft_model: Any, nth: int) -> Iterator[Happened]:
    """Let the nth forward of a draft model, or of any MTP head, return NaN.

    Forwards of prompts are not counted, since their logits are not used.
    """
    happened, calls = Happened(), 0
    forward, step = LaneRound.forward, Mtp.step

    def poison() -> bool:
        nonlocal calls
        calls += 1
        happened.faults += calls == nth
        return calls == nth

    def poisoned_forward(self: LaneRound, tokens: mx.array) -> mx.array:
        logits = forward(self, tokens)
        of_draft = self._lane.model is draft_model and len(tokens) <= LONGEST_LAG
        if of_draft and poison():
            return logits * mx.nan
        return logits

    def poisoned_step(self: Mtp, *args: Any) -> HeadOutput:
        out = step(self, *args)
        return out._replace(logits=out.logits * mx.nan) if poison() else out

    LaneRound.forward = poisoned_forward  # type: ignore[method-assign]
    Mtp.step = poisoned_step  # type: ignore[method-assign,assignment]
    try:
        yield happened
    finally:
        LaneRound.forward = forward  # type: ignore[method-assign]
        Mtp.step = step  # type: ignore[method-assign]
