"""One stream on all ranks: what they exchange, and in which order.

    exchange         rank 0 says                     the others say
    begin            a digest of the options         likewise; compared by all
    round            "plan", how many to draft;      "follow"
                     "turn", as planned before;
                     or "close", at its user's wish
    draft            how many were drafted           nothing
    (in the graph)   the drafted tokens; the round's tokens and how many are accepted

In each of them a rank may say "left" instead: it has ended the stream by an error, and
the text of the error follows. All of them end it then, and none is lost.

A stream that is dropped says nothing. Its forwards have been submitted on all ranks
alike, since the ranks agreed on each before it, so nobody waits for what is missing.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

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
from mlx_speculation.samplers import Sampling, Verified

LEFT_BYTES = 600  # of the text of an error
_LETTERS = 60  # of the name of what drafted, and of a plan's reason


class LeaderFollower(Protocol):
    """Decisions of a rank where ranks could differ; see `leader_follower`.

    `own` returns what this rank would do by itself. The leader calls it, says what it
    got and returns that. A follower does not call it, and returns what the leader has
    said. All ranks make the same calls in the same order.
    """

    def plan(self, decide: Callable[[], Plan]) -> Plan:
        """Return the leader's plan for a round; the ranks agree here where they are."""
        ...

    def draft(self, decide: Callable[[], Proposal]) -> Proposal:
        """Return the leader's draft, its tokens not evaluated."""
        ...

    def verify(
        self, decide: Callable[[], Verified], logits: mx.array, rows: int, accepts: bool
    ) -> Verified:
        """Return what the leader decides on rows of logits, not evaluated.

        Args:
            decide: decides.
            logits: [rows, vocab], the last of a forward's on this rank.
            rows: how many are decided on.
            accepts: whether the decision counts accepted tokens.
        """
        ...


class ClosedByLeaderError(Exception):
    """Ends the stream of a follower where the leader has ended its own."""

    def __init__(self, taken_back: int) -> None:
        super().__init__(taken_back)
        self.taken_back = taken_back  # how many of the known tokens go


class RankSession:
    """This rank's side of one stream.

    Its fields have to be the same on all ranks; its needs are what of the target rank
    0's drafter needs all ranks for.
    """

    def __init__(
        self, group: RankGroup, fields: Mapping[str, Any], *, needs: Sequence[str]
    ) -> None:
        self.group, self.number = group, group.next_number()
        self._fields = dict(fields)
        self._needs = list(needs)
        self._step = 0
        self._started = self._ended = False
        # The others wait, or may wait, for forwards of this rank.
        self._owes = False

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0."""
        return self.group.leads

    @property
    def running(self) -> bool:
        """Return whether the others count on this rank."""
        return self._started and not self._ended

    def with_seed(self, sampling: Sampling) -> Sampling:
        """Return the options with a seed, the same on all ranks."""
        return self.group.with_seed(sampling, self.number)

    def expect(self, fields: Mapping[str, Any]) -> None:
        """Add what has to be the same on all ranks."""
        self._fields |= fields

    def begin(self) -> list[str]:
        """Wait for all ranks to begin this stream, with the same options.

        Returns:
            What rank 0's drafter needs all ranks for.

        Raises:
            RankMismatchError: an option differs; on all ranks, and nothing has run.
            RankLostError: a rank is gone.
        """
        self._started = self._owes = True
        text = json.dumps(self._fields)
        digest = hashlib.sha256(text.encode()).hexdigest()
        said = [digest[:16], len(text.encode()), self._needs]
        rows = self.group.exchange(self._place("begin"), said)
        if any(row[0] != rows[0][0] for row in rows):
            texts = self.group.texts(text, max(row[1] for row in rows))
            raise RankMismatchError(_difference([json.loads(each) for each in texts]))
        return list(rows[0][2])

    def plan(self, plan: Plan | None) -> Plan:
        """Return rank 0's plan on every rank; others pass None.

        Raises:
            ClosedByLeaderError: rank 0 has ended the stream.
        """
        said: list[Any] = ["follow"]
        if plan is not None:
            said = ["plan", plan.length, plan.reason[:_LETTERS]]
        what = self._round(said)
        return Plan(*what) if plan is None else plan

    def turn(self) -> None:
        """Let all ranks agree on a round that was planned before.

        Raises:
            ClosedByLeaderError: rank 0 has ended the stream.
        """
        self._round(["turn" if self.leads else "follow"])

    def draft(self, draft: Proposal | None) -> tuple[int, str]:
        """Return how many tokens rank 0 has drafted, and who did; others pass None."""
        said = [] if draft is None else [draft.length, draft.source[:_LETTERS]]
        length, source = self._exchange("draft", said)[0]
        return length, source

    def from_leader(self, array: mx.array) -> mx.array:
        """Return rank 0's array on every rank, not evaluated."""
        return self.group.from_leader(array)

    def inside(self) -> AbstractContextManager[None]:
        """Return what surrounds all that may wait for other ranks."""
        return self.group.inside()

    def settled(self) -> None:
        """Note that a round is over: the others wait for no forward of this rank."""
        self._owes = False

    def close(self, taken_back: int) -> None:
        """End the stream here, on rank 0, and so on all ranks."""
        if self.running:
            self._ended = True
            self.group.exchange(self._place("round"), ["close", taken_back])

    def leave(self, kind: str, error: BaseException) -> None:
        """Say in an exchange that this rank ends the stream by an error.

        Raises:
            RankLostError: rank 0 has ended it by another one.
        """
        self._ended = True
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raw = text.encode()[:LEFT_BYTES]
        self._exchange(kind, ["left"], raw.decode(errors="ignore"))

    def end(self, error: BaseException | None = None) -> None:
        """Note that the stream has ended on this rank, as on all others or by error.

        Raises:
            RankLostError: in place of logits that cannot be used, where rank 0 has
                failed: by them it lets the others come out of a round.
        """
        running, self._ended = self.running, True
        if not running or error is None:
            return
        if isinstance(error, RankLostError | RankMismatchError):
            return  # it is known to all
        alike = isinstance(error, NonFiniteLogitsError | ConstraintError)
        if self._owes and not alike:
            self.group.leave(f"{type(error).__name__}: {error}")
            return
        self.leave("round", error)

    def _place(self, kind: str) -> Place:
        self._step += 1
        return Place(kind, self.number, self._step - 1)

    def _round(self, said: Sequence[Any]) -> list[Any]:
        """Begin a round on all ranks; return what rank 0 says of it."""
        word, *what = self._exchange("round", said)[0]
        if word == "close":
            self._ended = True
            raise ClosedByLeaderError(*what)
        self._owes = True
        return what

    def _exchange(
        self, kind: str, said: Sequence[Any], error: str = ""
    ) -> list[list[Any]]:
        """Exchange lines; where a rank has left, its error too."""
        owes, self._owes = self._owes, True  # until it is over, also by Ctrl-C
        rows = self.group.exchange(self._place(kind), said)
        self._owes = owes
        if any(row[:1] == ["left"] for row in rows) and rows[0][:1] != ["close"]:
            self._ended = True
            self._raise_left(self.group.texts(error, LEFT_BYTES), error)
        return rows

    def _raise_left(self, texts: Sequence[str], message: str) -> None:
        """Raise that another rank has left, unless this one did for the same reason."""
        rank = next(rank for rank, text in enumerate(texts) if text)
        if texts[rank].partition(":")[0] == message.partition(":")[0]:
            return
        raise RankLostError(
            f"{self.group.name(rank)} has left the stream, which has ended on all "
            f"ranks: {texts[rank]}"
        )


def _difference(fields: Sequence[Mapping[str, Any]]) -> str:
    """Return which option differs on which rank."""
    for name, first in fields[0].items():
        for rank, other in enumerate(fields):
            if other.get(name) != first:
                return (
                    f"{name} is {other.get(name)} on rank {rank}, and {first} on rank "
                    "0. Run the same program with the same models and options on every "
                    "rank."
                )
    return "The options of the ranks differ. Pass the same ones on every rank."
