"""Decisions of each round, made on rank 0 and received on the other ranks.

    decision       the leader, rank 0           a follower
    draft length   plans it and sends it        receives it
    draft          drafts, sends the length,    receives the length, and the tokens in
                   and the tokens in the graph  the graph
    verify         decides, and sends tokens    receives them
                   and the accepted number in
                   the graph, in one array

So only rank 0 has a drafter, and only rank 0 chooses tokens.
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
    """Makes the decisions, and sends them to the followers."""

    def __init__(self, session: RankSession) -> None:
        self._session = session

    def plan(self, decide: Callable[[], Plan]) -> Plan:
        """Return this rank's plan, and send it."""
        try:
            plan = decide()
        except BaseException as error:
            self._session.leave("round", error)
            raise
        return self._session.plan(plan)

    def draft(self, decide: Callable[[], Proposal]) -> Proposal:
        """Return this rank's draft, and send it."""
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
        """Return this rank's decision, and send it.

        If `decide` fails, for example in a user's logits processor, the followers get
        unusable rows, which end the round there too.
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
    """Receives the leader's decisions, without log-probabilities."""

    def __init__(self, session: RankSession) -> None:
        self._session = session

    def plan(self, decide: Callable[[], Plan]) -> Plan:
        """Return the leader's plan."""
        return self._session.plan(None)

    def draft(self, decide: Callable[[], Proposal]) -> Proposal:
        """Return the leader's draft, without its probabilities."""
        length, source = self._session.draft(None)
        tokens = mx.zeros((length,), mx.uint32)
        if length:
            tokens = self._session.from_leader(tokens)
            mx.async_eval(tokens)
        return Proposal(tokens, source=source)

    def verify(
        self, decide: Callable[[], Verified], logits: mx.array, rows: int, accepts: bool
    ) -> Verified:
        """Return the leader's decision on the same rows."""
        # After the logits, whose sums over the ranks have to be computed first
        packed = mx.depends(_zeros(rows, accepts), logits)
        return _unpacked(self._session.from_leader(packed), rows)


class RankedPolicy:
    """The draft lengths of the leader, on every rank.

    The policies of followers are not called.
    """

    def __init__(
        self, role: LeaderFollower, policy: DraftLengthPolicy, *, leads: bool
    ) -> None:
        self._role, self._policy, self._leads = role, policy, leads
        self.longest = policy.longest

    def plan(self, context: int, limit: int) -> Plan:
        """Return the leader's plan; this waits for all ranks."""
        return self._role.plan(lambda: self._policy.plan(context, limit))

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Let the leader's policy learn from a round."""
        if self._leads:
            self._policy.note(context, plan, feedback)


class RankedDrafter(WrappedDrafter):
    """The drafter of the leader, on every rank.

    `inner` handles its own faults; a follower has none, and passes None.
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
        """Return the leader's decision; see `Verifier`."""
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
        """Yield the leader's decision on each row in turn; see `Verifier`."""
        k = 0 if drafted is None else len(drafted)
        turns = self._inner.sequential(logits, rows, drafted, draft_probs, top=top)
        for index in range(k + 1):
            yield self._role.verify(lambda: next(turns), logits, 1, index < k)


def on_ranks(request: Request, session: RankSession) -> Request:
    """Return a request whose decisions come from the leader."""
    leads = session.leads
    role: LeaderFollower = Leader(session) if leads else Follower(session)
    return replace(
        request,
        drafter=RankedDrafter(role, request.drafter),
        policy=RankedPolicy(role, request.policy, leads=leads),
        decisions=RankedDecisions(role, request.verifier),
    )


def never_called(chooser: Chooser) -> Sampling:
    """Return the sampling options of a follower, which calls no logits processor.

    It verifies row by row if the leader does.
    """
    serial = not chooser.processors.parallel
    return replace(chooser.sampling, logits_processors=(_idle,) if serial else ())


def _idle(tokens: mx.array, logits: mx.array) -> mx.array:
    """Change nothing; makes a follower verify row by row."""
    return logits


def _zeros(rows: int, accepts: bool) -> mx.array:
    return mx.zeros((2 * rows + accepts,), mx.uint32)


def _unpacked(packed: mx.array, rows: int) -> Verified:
    """Return a decision of tokens [rows], flags of usable rows, and a count."""
    usable = packed[rows : 2 * rows] > 0
    accepted = packed[2 * rows].astype(mx.int32) if len(packed) > 2 * rows else None
    return Verified(packed[:rows], accepted, mx.where(usable, 0.0, mx.nan))
