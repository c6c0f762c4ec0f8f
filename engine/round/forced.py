"""Drafts that need no drafter: the tokens that a constraint leaves no choice of.

    schema  {"name": string}, committed nothing
    masks   {" alone, then name alone, then ":" alone, then many ids
    draft   {" name ":"

The target gives such a token all of its probability, whatever its logits are, so that
it is accepted under every rule. What remains of the round is one choice behind them.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Proposal
from mlx_speculation.engine.round.outcome import Pending
from mlx_speculation.engine.round.request import Running


def forced_drafts(
    running: Running, step: Pending | None, limits: Sequence[int]
) -> dict[int, Proposal]:
    """Return the tokens that have to come next, of requests where there is no choice.

    Streams that never draft have none. Neither have those of several ranks: they learn
    from rank 0 what is drafted, and this is no drafter's.

    Args:
        running: whose texts they are, some of them under constraints.
        step: the step in flight, if there is one; the first token is then the step's,
            which is read here. The masks of what follows it would wait for it too.
        limits: how many tokens each may draft, without that one.
    """
    result: dict[int, Proposal] = {}
    if not running.masked:
        return result
    ahead: Any = None
    for place, request in enumerate(running.requests):
        limit = min(limits[place], request.policy.longest)
        ranked = request.decisions is not None
        if request.text is None or request.drafter is None or ranked or limit <= 0:
            continue
        if step is not None and ahead is None:
            step.wait(running.clock)
            ahead = step.tokens.tolist()
        before = [] if ahead is None else [ahead[place]]
        try:
            forced = request.text.forced(before, limit)
        except Exception:
            if running.alone:
                raise
            continue  # its masks fail too, which ends this request alone
        if forced:
            tokens = mx.array([*before, *forced], mx.uint32)
            result[place] = Proposal(tokens, source="forced")
    return result
