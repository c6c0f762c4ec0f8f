"""Drafts that need no drafter: the tokens that a constraint leaves no choice of.

    schema  {"name": string}, committed nothing
    masks   {" alone, then name alone, then ":" alone, then many ids
    draft   {" name ":"

The target gives such a token all of its probability, whatever its logits are, so that
it is accepted under every rule. What remains of the round is one choice behind them.
"""

from typing import Any

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.round.outcome import Pending
from mlx_speculation.engine.round.request import Request


def forced_draft(request: Request, step: Pending | None, limit: int) -> Proposal | None:
    """Return the tokens that have to come next; None where there is a choice.

    Streams that never draft have none. Neither have those of several ranks: they learn
    from rank 0 what is drafted, and this is no drafter's.

    Args:
        request: whose text it is, under a constraint.
        step: the step in flight, if there is one; the first token is then the step's,
            which is read here. The masks of what follows it would wait for it too.
        limit: how many tokens may be drafted, without that one.
    """
    limit = min(limit, request.policy.longest)
    ranked = request.decisions is not None
    if request.text is None or request.drafter is None or ranked or limit <= 0:
        return None
    ahead: Any = []
    if step is not None:
        step.wait(request.clock)
        ahead = step.verified.tokens.tolist()
    forced = request.text.forced(ahead, limit)
    if not forced:
        return None
    return Proposal(mx.array([*ahead, *forced], mx.uint32), source="forced")
