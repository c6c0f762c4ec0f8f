"""Decisions of each round, made on rank 0 and received on the others.

    asked of       the leader, rank 0           a follower
    draft length   asks its own, and sends it   receives it
    drafter        asks its own, and sends      receives how many; the tokens come in
                   how many                     the graph
    verifier       decides, and sends tokens    gets them
                   and count in the graph, in
                   one small array

So a draft is on rank 0 alone, and the others choose nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_speculation.engine.distributed.session import LeaderFollower, RankSession
from mlx_speculation.engine.draft_length.base import DraftLengthPolicy, Feedback, Plan
from mlx_speculation.engine.drafters.base import (
    Choose,
    OpenDrafter,
    Proposal,
    WrappedDrafter,
)
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.request import Request
from mlx_speculation.samplers import Chooser, Rows, Sampling, Verified, Verifier


class Leader:
    """Decides, and says what it decides."""

    def __init__(self, session: RankSession) -> None:
        self._session = session

    def plan(self, decide: Callable[[], Plan]) -> Plan:
        """Return its own plan, said to the others."""
        try:
            plan = decide()
        except BaseException as error:
            self._session.leave("round", error)
            raise
        return self._session.plan(plan)

    def draft(self, decide: Callable[[], Proposal]) -> Proposal:
        """Return its own draft, said to the others."""
        try:
            draft = decide()
        except BaseException as error:
            self._session.leave("draft", error)
            raise
        self._session.draft(draft)
        if draft.length == 0:
            return draft
        draft = replace(draft, tokens=self._session.from_leader(draft.tokens))
        mx.async_eval(draft.tokens)
        return draft

    def verify(
        self, decide: Callable[[], Verified], logits: mx.array, rows: int, accepts: bool
    ) -> Verified:
        """Decide, and send it.

        Where it fails, such as in a logits processor of the user's, the others get rows
        that cannot be used, so that they come out of the round too.
        """
        try:
            result = decide()
        except BaseException:
            nothing = mx.depends(_zeros(rows, accepts), logits)
            mx.async_eval(self._session.from_leader(nothing))
            self._session.settled()
            raise
        parts = [result.tokens, mx.isfinite(result.normalizers)]
        if result.accepted is not None:
            parts.append(result.accepted[None])
        packed = mx.concatenate([part.astype(mx.uint32) for part in parts])
        packed = self._session.from_leader(packed)
        return replace(_unpacked(packed, rows), log_probs=result.log_probs)


class Follower:
    """Does what the leader has decided.

    It reports no log-probabilities.
    """

    def __init__(self, session: RankSession) -> None:
        self._session = session

    def plan(self, decide: Callable[[], Plan]) -> Plan:
        """Return the leader's plan."""
        return self._session.plan(None)

    def draft(self, decide: Callable[[], Proposal]) -> Proposal:
        """Return the leader's draft; its probabilities are the leader's alone."""
        length, source = self._session.draft(None)
        tokens = mx.zeros((length,), mx.uint32)
        if length:
            tokens = self._session.from_leader(tokens)
            mx.async_eval(tokens)
        return Proposal(tokens, source=source)

    def verify(
        self, decide: Callable[[], Verified], logits: mx.array, rows: int, accepts: bool
    ) -> Verified:
        """Return what the leader decides on the same rows."""
        # Behind the logits, whose own sums over the ranks come first.
        packed = mx.depends(_zeros(rows, accepts), logits)
        return _unpacked(self._session.from_leader(packed), rows)


class RankedPolicy:
    """The draft lengths of the leader, on every rank.

    Those of followers are not asked, and learn nothing.
    """

    def __init__(
        self, role: LeaderFollower, policy: DraftLengthPolicy, *, leads: bool
    ) -> None:
        self._role, self._policy, self._leads = role, policy, leads
        self.longest = policy.longest

    def plan(self, context: int, limit: int) -> Plan:
        """Return the leader's plan; the ranks meet here."""
        return self._role.plan(lambda: self._policy.plan(context, limit))

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Learn from a round."""
        if self._leads:
            self._policy.note(context, plan, feedback)

    def end(self) -> None:
        """Learn from the stream as a whole."""
        if self._leads:
            self._policy.end()


class RankedDrafter(WrappedDrafter):
    """The drafter of the leader, on every rank; it contains its own faults.

    A follower has one that proposes nothing.
    """

    def __init__(self, role: LeaderFollower, inner: OpenDrafter | None) -> None:
        super().__init__(inner or OpenDrafter())
        self._role = role

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Return the leader's draft."""
        decide = partial(self.inner.propose, sequence, limit, choose)
        return self._role.draft(decide)


class RankedDecisions(Verifier):
    """The decisions of the leader's verifier, on every rank."""

    def __init__(self, role: LeaderFollower, inner: Verifier) -> None:
        super().__init__(inner.chooser)
        self._role, self._inner = role, inner

    def verify(
        self,
        logits: mx.array,
        rows: Rows,
        drafted: mx.array | None = None,
        draft_probs: mx.array | None = None,
        *,
        top: int | None = None,
    ) -> Verified:
        """Return the leader's decision, see `Verifier`."""
        k = 0 if drafted is None else len(drafted)

        def decide() -> Verified:
            return self._inner.verify(logits, rows, drafted, draft_probs, top=top)

        return self._role.verify(decide, logits, k + 1, drafted is not None)

    def sequential(
        self,
        logits: mx.array,
        rows: Rows,
        drafted: mx.array | None = None,
        draft_probs: mx.array | None = None,
        *,
        top: int | None = None,
    ) -> Iterator[Verified]:
        """Yield the leader's decisions on row after row, see `Verifier`."""
        k = 0 if drafted is None else len(drafted)
        turns = self._inner.sequential(logits, rows, drafted, draft_probs, top=top)
        for index in range(k + 1):
            yield self._role.verify(lambda: next(turns), logits, 1, index < k)


def on_ranks(request: Request, session: RankSession) -> Request:
    """Return a request as this rank runs it in a stream of all ranks."""
    leads = session.leads
    role: LeaderFollower = Leader(session) if leads else Follower(session)
    return replace(
        request,
        drafter=RankedDrafter(role, request.drafter),
        policy=RankedPolicy(role, request.policy, leads=leads),
        decisions=RankedDecisions(role, request.verifier),
    )


def never_called(chooser: Chooser) -> Sampling:
    """Return the options of a follower: none of its processors is called.

    Its rounds go row by row where the leader's do.
    """
    serial = not chooser.processors.parallel
    return replace(chooser.sampling, logits_processors=(_idle,) if serial else ())


def _idle(tokens: mx.array, logits: mx.array) -> mx.array:
    """Stand for a processor that is called for one row after the other."""
    return logits


def _zeros(rows: int, accepts: bool) -> mx.array:
    return mx.zeros((2 * rows + accepts,), mx.uint32)


def _unpacked(packed: mx.array, rows: int) -> Verified:
    """Return a decision from tokens [rows], whether each is usable, and the count."""
    usable = packed[rows : 2 * rows] > 0
    accepted = packed[2 * rows].astype(mx.int32) if len(packed) > 2 * rows else None
    return Verified(packed[:rows], accepted, mx.where(usable, 0.0, mx.nan))
