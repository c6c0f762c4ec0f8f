"""Decisions of each round, made on rank 0 and received on the other ranks.

    decision       the leader, rank 0           a follower
    draft length   plans it and sends it        receives it
    draft          drafts, and sends the        receives them
                   length and the tokens
    verify         decides, and sends tokens    receives them
                   and the accepted number

Tokens and accepted numbers are sent by lazy operations, in mlx's graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_speculation.engine.distributed.session import RankSession
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


class RankedPolicy:
    """The leader's draft lengths, on every rank; followers' policies are not called."""

    def __init__(self, session: RankSession, policy: DraftLengthPolicy) -> None:
        self._session, self._policy = session, policy
        self.longest = policy.longest

    def plan(self, context: int, limit: int) -> Plan:
        """Return the leader's plan; this waits for all ranks."""
        plan = None
        if self._session.leads:
            with self._session.leaving("round"):
                plan = self._policy.plan(context, limit)
        return self._session.plan(plan)

    def note(self, context: int, plan: Plan, feedback: Feedback) -> None:
        """Let the leader's policy learn from a round."""
        if self._session.leads:
            self._policy.note(context, plan, feedback)


class RankedDrafter(WrappedDrafter):
    """The leader's drafter, on every rank; a follower passes None for `inner`."""

    def __init__(self, session: RankSession, inner: OpenDrafter | None) -> None:
        super().__init__(inner or OpenDrafter())
        self._session = session

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Proposal:
        """Return the leader's draft; followers get no probabilities."""
        draft = None
        if self._session.leads:
            with self._session.leaving("draft"):
                draft = self.inner.propose(sequence, limit, choose)
        length, source = self._session.draft(draft)
        if draft is None:
            draft = Proposal(mx.zeros((length,), mx.uint32), source=source)
        if length == 0:
            return draft
        draft = replace(draft, tokens=self._session.from_leader(draft.tokens))
        mx.async_eval(draft.tokens)
        return draft


class RankedDecisions(Verifier):
    """The decisions of the leader's verifier, on every rank."""

    def __init__(self, session: RankSession, inner: Verifier) -> None:
        super().__init__(inner.chooser)
        self._session, self._inner = session, inner

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
        verify = self._inner.verify
        decide = partial(verify, logits, rows, drafted, draft_probs, top=top)
        return self._shared(decide, logits, k + 1, accepts=drafted is not None)

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
            yield self._shared(partial(next, turns), logits, 1, accepts=index < k)

    def _shared(
        self,
        decide: Callable[[], Verified],
        logits: mx.array,
        rows: int,
        *,
        accepts: bool,
    ) -> Verified:
        """Return the leader's decision on `rows` rows of `logits`, made by `decide`.

        If `decide` fails, for example in a user's logits processor, the followers get
        unusable rows, which end the followers' round too. Log-probabilities are not
        sent. With `accepts`, the decision has a number of accepted tokens.
        """
        # `packed` depends on the logits, so that it is sent after the arrays that the
        # ranks exchange in the forward.
        zeros = mx.zeros((2 * rows + accepts,), mx.uint32)
        packed, log_probs = mx.depends(zeros, logits), None
        if self._session.leads:
            try:
                result = decide()
            except BaseException:
                mx.async_eval(self._session.from_leader(packed))
                self._session.settled()
                raise
            parts = [result.tokens, mx.isfinite(result.normalizers)]
            if result.accepted is not None:
                parts.append(result.accepted[None])
            packed = mx.concatenate([part.astype(mx.uint32) for part in parts])
            log_probs = result.log_probs
        packed = self._session.from_leader(packed)
        usable = packed[rows : 2 * rows] > 0
        accepted = packed[2 * rows].astype(mx.int32) if len(packed) > 2 * rows else None
        normalizers = mx.where(usable, 0.0, mx.nan)
        return Verified(packed[:rows], accepted, normalizers, log_probs)


def on_ranks(request: Request, session: RankSession) -> Request:
    """Return a request whose decisions come from the leader."""
    return replace(
        request,
        drafter=RankedDrafter(session, request.drafter),
        policy=RankedPolicy(session, request.policy),
        decisions=RankedDecisions(session, request.verifier),
    )


def never_called(chooser: Chooser) -> Sampling:
    """Return a follower's sampling options, without the user's logits processors.

    If the leader has to verify row by row, an idle processor makes the follower do so.
    """
    serial = not chooser.processors.parallel
    return replace(chooser.sampling, logits_processors=(_idle,) if serial else ())


def _idle(tokens: mx.array, logits: mx.array) -> mx.array:
    """Change nothing."""
    return logits
