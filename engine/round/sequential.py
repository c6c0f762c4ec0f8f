"""Rows decided one after the other, each when the one before is known to stay.

A logits processor that says nothing of its state is called once for each emitted
token, in order, as in plain decoding. So a row is decided when its drafted token was
accepted and does not end the text, and the host reads each decision. Nothing is
submitted ahead.
"""

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from mlx_speculation.engine.drafters.base import OpenDrafter, Proposal
from mlx_speculation.engine.round.outcome import (
    Cut,
    RoundOutcome,
    origin_of,
    outcome_of,
)
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.round.verify import rows_of, unseen
from mlx_speculation.models import LaneRound
from mlx_speculation.samplers import Constrained, Verified


def run_in_turn(
    request: Request, draft: Proposal, cut: Cut, drafter: OpenDrafter | None
) -> tuple[RoundOutcome, LaneRound]:
    """Run a round whose rows are decided one after the other, and commit it.

    Args:
        request: what it is run with.
        draft: what was drafted, perhaps nothing.
        cut: gets each token when it is known.
        drafter: whose draft it is; None: nobody's.

    Returns:
        What it brought, and the transaction.
    """
    fed = unseen(request)
    with request.target.begin(whole=draft.length == 0) as lane_round:
        turns = _verify(request, lane_round, fed, draft)
        outcome = decide_in_turn(turns, cut, request.text, draft.length)
        request.clock.note("sampler")
        held = len(fed) + outcome.accepted
        lane_round.prepare(held)
        if draft.length and drafter is not None:
            drafter.settle(outcome.accepted)
        request.sequence.tokens += outcome.tokens
        lane_round.commit(held)
    request.statistics.reads += len(outcome.tokens) - 1 + (draft.length > 0)
    return outcome, lane_round


def _verify(
    request: Request, lane_round: LaneRound, fed: mx.array, draft: Proposal
) -> Iterator[Verified]:
    """Run a forward over the fed tokens and the draft; decide rows when asked."""
    k, clock = draft.length, request.clock
    logits = lane_round.forward(mx.concatenate([fed, draft.tokens]))[-1 - k :]
    if k:
        clock.wait("draft", draft.tokens)
    clock.submit("verify", logits)
    clock.wait("verify", logits)
    drafted = draft.tokens if k else None
    rows = rows_of(request, logits, drafted, k + 1)
    decisions = request.decisions or request.verifier
    return decisions.in_turn(logits, rows, drafted, draft.probs, top=request.top)


def decide_in_turn(
    turns: Iterator[Verified], cut: Cut, text: Constrained | None, drafted: int
) -> RoundOutcome:
    """Decide rows up to a rejection, the end of the text, or the last one.

    Args:
        turns: decides on the next row when it is asked for one.
        cut: gets each token when it is known.
        text: the text under its constraint, if there is one.
        drafted: how many tokens were drafted.

    Returns:
        What all of these rows together brought.
    """
    whole = RoundOutcome([], [], drafted)
    for verified in turns:
        one = outcome_of(verified)
        accepted = whole.accepted + one.accepted
        whole = replace(
            whole,
            tokens=whole.tokens + one.tokens,
            origins=[*whole.origins, origin_of(len(whole.tokens), accepted, drafted)],
            accepted=accepted,
            log_probs=[*whole.log_probs, *one.log_probs],
        )
        stays = whole if text is None else whole.under(text)
        reason = cut(_last_of(stays)).reason
        if reason is not None or not one.accepted:
            return replace(whole, reason=reason)
        if text is not None:
            place = text.place(stays.tokens)
            if place is not None and not place.goes_on:
                break
    return whole


def _last_of(outcome: RoundOutcome) -> RoundOutcome:
    """Return the last token alone."""
    end = len(outcome.tokens) - 1
    return replace(
        outcome,
        tokens=outcome.tokens[end:],
        origins=outcome.origins[end:],
        log_probs=outcome.log_probs[end:],
    )
