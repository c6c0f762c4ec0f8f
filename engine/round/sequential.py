"""Rows decided one after the other, each when the one before is known to stay.

A logits processor that says nothing of its state is called once for each emitted
token, in order, as in plain decoding. So a row is decided when its drafted token was
accepted and does not end the text, and the host reads each decision.
"""

from collections.abc import Iterator
from dataclasses import replace

from mlx_speculation.engine.round.outcome import (
    Cut,
    RoundOutcome,
    origin_of,
    outcome_of,
)
from mlx_speculation.samplers import Constrained, Verified


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
        stays = whole.under(text)
        reason = cut(stays.last).reason
        if reason is not None or not one.accepted:
            return replace(whole, reason=reason)
        if text is not None:
            place = text.place(stays.tokens)
            if place is not None and not place.goes_on:
                break
    return whole
