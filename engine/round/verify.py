"""The target's forwards of one request, and the choices from their rows.

step       its tokens all stay: committed when it is submitted, one row chosen from
verify     a draft's rows and one more, decided on the device together
"""

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.round.outcome import Pending
from mlx_speculation.engine.round.request import Request
from mlx_speculation.models import LaneRound
from mlx_speculation.samplers import Rows


def submit_step(request: Request, behind: Pending | None = None) -> Pending:
    """Submit a forward whose tokens all stay, behind a step that is not read."""
    clock = request.clock
    fed = unseen(request) if behind is None else behind.verified.tokens
    with request.target.begin(whole=True) as lane_round:
        # Layers may be submitted already.
        logits = clock.hand_over("verify", lane_round.forward, fed)
        if len(logits) > 1:
            logits = logits[-1:]
        early = request.explain or request.masks is not None
        if early and behind is not None:
            behind.wait(clock)  # the masks would wait for its tokens
        if early:
            clock.submit("verify", logits)  # runs while masks are made
        rows = rows_of(request, logits, None if behind is None else fed)
        decisions = request.decisions or request.verifier
        verified = decisions.verify(logits, rows, top=request.top)
        clock.submit("verify", *verified.arrays)
        lane_round.commit(len(fed))
    return Pending(lane_round, len(fed), logits if early else None, verified)


def submit_verify(
    request: Request, lane_round: LaneRound, draft: Proposal, step: Pending | None
) -> Pending:
    """Submit a forward over a draft, and over what the target has not seen.

    Args:
        request: whose rows they are.
        lane_round: the transaction.
        draft: the tokens; behind a step the first one stands for the step's.
        step: the step in flight, if there is one.
    """
    # 4. One forward of the target over what it has not seen and the draft.
    clock, exact = request.clock, request.explain
    if step is None:
        fed = unseen(request)
    else:
        fed, draft = step.verified.tokens, draft.behind(1)
    tokens, k = draft.tokens, draft.length
    both = mx.concatenate([fed, tokens])
    logits = lane_round.forward(both)[-1 - k :]
    if not exact:
        clock.submit("verify", logits)  # runs while its choices' graph is built
    if step is not None:
        step.wait(clock)
    clock.wait("draft", tokens)
    if exact:
        clock.submit("verify", logits)
    # 5. The sampler turns the last k + 1 rows into choices and the acceptance.
    rows = rows_of(request, logits, tokens if step is None else both, k + 1)
    decisions = request.decisions or request.verifier
    verified = decisions.verify(logits, rows, tokens, draft.probs, top=request.top)
    if exact:
        clock.wait("verify", logits)
    clock.submit("sampler" if exact else "verify", *verified.arrays)
    return Pending(lane_round, len(fed), logits, verified)


def unseen(request: Request) -> mx.array:
    """Return the known tokens that the target has not seen, uint32 [n]."""
    return mx.array(request.sequence.tokens[request.target.seen :], mx.uint32)


def rows_of(
    request: Request, logits: mx.array, ahead: mx.array | None, count: int = 1
) -> Rows:
    """Return what precedes each of the target's rows, and what it may choose."""
    known = request.sequence
    rows = Rows(known.tokens, ahead, count, known.start)
    return rows if request.masks is None else request.masks.on(logits, rows)
