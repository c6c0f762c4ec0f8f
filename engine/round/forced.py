"""Drafts of tokens that a constraint forces, because it allows no others.

    schema  {"name": string}, no token committed yet
    masks   {" alone, then name alone, then ":" alone, then many ids
    draft   {" name ":"

Under its mask a forced token has probability 1, so every acceptance rule accepts it.
The round chooses only the token after the draft.
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
    """Return the drafts of requests with forced tokens, by the request's index.

    Only requests with a drafter get forced drafts. On several ranks there are none:
    rank 0 sends the other ranks only the proposals of its drafter.

    If a step is in flight, the function waits for its token, with which each draft then
    begins. `limits` do not include this token.

    Raises:
        ConstraintError: the only request's constraint allows no token and no end.
    """
    result: dict[int, Proposal] = {}
    ahead: Any = None
    for place, request in enumerate(running.requests):
        limit = min(limits[place], request.policy.longest)
        if running.alone and request.text is not None:
            request.text.check()
            limit = request.within(limit)
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
            continue  # later the masks fail in the same way, for this request only
        if forced:
            tokens = mx.array([*before, *forced], mx.uint32)
            result[place] = Proposal(tokens, source="forced")
    return result
