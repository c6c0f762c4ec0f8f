"""One stream on all ranks: the messages that the ranks exchange, and their order.

    exchange         rank 0 sends                    the other ranks send
    begin            a digest of the options         the same; all ranks compare them
    round            "plan" with the draft length,   "follow"
                     "turn" for a round planned
                     before, or "close" if the
                     caller has ended the stream
    draft            the number of drafted tokens    nothing
    (in the graph)   the drafted tokens; the round's tokens and the number accepted

In each exchange a rank may send "left" instead, followed by the text of the error that
has ended the stream on that rank. All ranks then end the stream, and the group remains
usable.

A stream that is garbage-collected before it has ended sends nothing.

The ranks agree before each forward, so no rank waits for a forward that another rank
never runs.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.distributed.group import Place, RankGroup
from mlx_speculation.engine.draft_length.base import Plan
from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.errors import (
    ConstraintError,
    NonFiniteLogitsError,
    RankLostError,
    RankMismatchError,
)
from mlx_speculation.models import broadcast
from mlx_speculation.samplers import Sampling

LEFT_BYTES = 600  # an error's text is cut to this size
_LETTERS = 60  # a drafter's name and a plan's reason are cut to this length


class ClosedByLeaderError(Exception):
    """Ends a follower's stream after rank 0 has closed its own."""

    def __init__(self, taken_back: int) -> None:
        super().__init__(taken_back)
        self.taken_back = taken_back  # how many of the last known tokens to remove


class RankSession:
    """This rank's side of one stream; `fields` must be equal on all ranks.

    `plan` and `turn` raise ClosedByLeaderError if rank 0 has ended the stream.
    """

    def __init__(
        self,
        group: RankGroup,
        fields: Mapping[str, Any],
        *,
        needs: Sequence[str],  # what rank 0's drafter needs of the target
    ) -> None:
        self.group, self.leads = group, group.leads
        self.fields = dict(fields)
        self._number, self._needs = group.next_number(), list(needs)
        self._step = 0
        self._started = self._ended = False
        self._owes = False  # other ranks may be waiting for a forward of this rank

    @property
    def running(self) -> bool:
        """Return whether the stream has begun and has not ended on this rank."""
        return self._started and not self._ended

    def with_seed(self, sampling: Sampling) -> Sampling:
        """Return the options; if they have no seed, add one that all ranks share."""
        if sampling.seed is not None:
            return sampling
        text = f"{self.group.word} {self._number}"
        digest = hashlib.sha256(text.encode()).digest()
        return replace(sampling, seed=int.from_bytes(digest[:4]))

    def begin(self) -> list[str]:
        """Wait until all ranks begin this stream; return the `needs` of rank 0.

        Raises:
            RankMismatchError: an option differs; all ranks raise it.
            RankLostError: a rank is gone.
        """
        self._started = self._owes = True
        text = json.dumps(self.fields, default=_named, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        said = [digest[:16], len(text.encode()), self._needs]
        rows = self.group.exchange(self._place("begin"), said)
        if any(row[0] != rows[0][0] for row in rows):
            texts = self.group.texts(text, max(row[1] for row in rows))
            raise RankMismatchError(_difference([json.loads(each) for each in texts]))
        return list(rows[0][2])

    def plan(self, plan: Plan | None) -> Plan:
        """Return rank 0's plan on every rank; the other ranks pass None."""
        said: list[Any] = ["follow"]
        if plan is not None:
            said = ["plan", plan.length, plan.reason[:_LETTERS]]
        what = self._round(said)
        return Plan(*what) if plan is None else plan

    def turn(self) -> None:
        """Begin on all ranks a round that already has a plan."""
        self._round(["turn" if self.leads else "follow"])

    def draft(self, draft: Proposal | None) -> tuple[int, str]:
        """Return length and source of rank 0's draft; the other ranks pass None."""
        said = [] if draft is None else [draft.length, draft.source[:_LETTERS]]
        length, source = self._exchange("draft", said)[0]
        return length, source

    def from_leader(self, array: mx.array) -> mx.array:
        """Return rank 0's array on every rank, unevaluated."""
        return broadcast(array, self.group.group)

    def settled(self) -> None:
        """Record the end of a round: no rank waits for a forward of this rank."""
        self._owes = False

    def close(self, taken_back: int) -> None:
        """End the stream on all ranks; only rank 0 may call this."""
        if self.running:
            self._ended = True
            self.group.exchange(self._place("round"), ["close", taken_back])

    @contextmanager
    def leaving(self, kind: str) -> Iterator[None]:
        """Run a block; if it fails, end the stream on all ranks by an exchange."""
        try:
            yield
        except BaseException as error:
            self._leave(kind, error)
            raise

    def _leave(self, kind: str, error: BaseException) -> None:
        """Tell the other ranks in an exchange that an error has ended the stream."""
        self._ended = True
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raw = text.encode()[:LEFT_BYTES]
        self._exchange(kind, ["left"], raw.decode(errors="ignore"))

    def end(self, error: BaseException | None = None) -> None:
        """Record the end of the stream, and tell the other ranks of an `error`.

        Raises:
            RankLostError: a lower rank has failed too, with an error of another type,
                which may have caused `error`.
        """
        running, self._ended = self.running, True
        if not running or error is None:
            return
        if isinstance(error, RankLostError | RankMismatchError):
            return  # all ranks raise it
        alike = isinstance(error, NonFiniteLogitsError | ConstraintError)
        if self._owes and not alike:
            self.group.leave(f"{type(error).__name__}: {error}")
            return
        self._leave("round", error)

    def _place(self, kind: str) -> Place:
        self._step += 1
        return Place(kind, self._number, self._step - 1)

    def _round(self, said: Sequence[Any]) -> list[Any]:
        """Begin a round on all ranks; return rank 0's values for it."""
        word, *what = self._exchange("round", said)[0]
        if word == "close":
            self._ended = True
            raise ClosedByLeaderError(*what)
        self._owes = True
        return what

    def _exchange(
        self, kind: str, said: Sequence[Any], error: str = ""
    ) -> list[list[Any]]:
        """Exchange lines, and also the texts of errors if a rank has left."""
        owes, self._owes = self._owes, True  # stays True if Ctrl-C ends the exchange
        rows = self.group.exchange(self._place(kind), said)
        self._owes = owes
        if any(row[:1] == ["left"] for row in rows) and rows[0][:1] != ["close"]:
            self._ended = True
            self._raise_left(self.group.texts(error, LEFT_BYTES), error)
        return rows

    def _raise_left(self, texts: Sequence[str], message: str) -> None:
        """Raise RankLostError with the error of the first rank that has one.

        `texts` are the errors of all ranks, "" for none. If that first error has the
        type of `message`, this rank's own error, nothing is raised.
        """
        rank = next(rank for rank, text in enumerate(texts) if text)
        if texts[rank].partition(":")[0] == message.partition(":")[0]:
            return
        who = self.group.names[rank].capitalize()
        raise RankLostError(
            f"{who} has left the stream, which has ended on all ranks: {texts[rank]}"
        )


def _difference(fields: Sequence[Mapping[str, Any]]) -> str:
    """Return a text on the first option that differs."""
    first = fields[0]
    name, rank = next(
        (name, rank)
        for name in first
        for rank, other in enumerate(fields)
        if other.get(name) != first[name]
    )
    return (
        f"{name} is {fields[rank].get(name)} on rank {rank}, and {first[name]} on rank "
        "0. Run the same program with the same models and options on every rank."
    )


def _named(value: Any) -> Any:
    """Return what JSON has in place of `value`; it is the same on all ranks."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
