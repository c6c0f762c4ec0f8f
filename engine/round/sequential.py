"""Rows decided one by one, for logits processors with a state that is not declared.

Such a processor is called once for each emitted token, in order, as in plain decoding.
So a row is decided only when the token before it is known, was accepted and does not
end the text. The host reads each decision, with one read a position for all such
requests of a round. No step is submitted ahead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx

from mlx_speculation.engine.round.outcome import (
    Read,
    RoundOutcome,
    origin_of,
    outcome_of,
)
from mlx_speculation.samplers import Constrained, Verified


@dataclass(slots=True)
class Turn:
    """The rows of one request."""

    rows: Iterator[Verified]  # each `next` decides one more row
    cut: Callable[[RoundOutcome], RoundOutcome]  # gets each token once it is known
    text: Constrained | None  # the text under its constraint, if there is one
    drafted: int  # how many tokens were drafted
    whole: RoundOutcome = field(default_factory=lambda: RoundOutcome([], []))

    def take(self, verified: Verified) -> bool:
        """Take a decided row; return whether the next one is to be decided."""
        one, whole, text = outcome_of(verified), self.whole, self.text
        accepted = whole.accepted + one.accepted
        origin = origin_of(len(whole.tokens), accepted, self.drafted)
        whole = self.whole = RoundOutcome(
            whole.tokens + one.tokens,
            [*whole.origins, origin],
            self.drafted,
            accepted,
            [*whole.log_probs, *one.log_probs],
        )
        stays = whole if text is None else whole.under(text)
        reason = self.cut(_last_of(stays)).reason
        if reason is not None or not one.accepted:
            self.whole = replace(whole, reason=reason)
            return False
        place = None if text is None else text.place(stays.tokens)
        return place is None or place.goes_on


def decide_sequentially(
    turns: dict[int, Turn], failure: Callable[[BaseException], Exception]
) -> dict[int, Read]:
    """Decide rows up to a rejection, the end of each text, or the last row.

    Args:
        turns: of the requests, by their places.
        failure: returns the error of one request, or raises it.

    Returns:
        The outcome of each request over all its rows, or its error, by place.
    """
    result: dict[int, Read] = {}
    live = dict(turns)

    def attempt(place: int, act: Callable[[], bool]) -> None:
        try:
            if act():
                return
            result[place] = turns[place].whole
        except BaseException as error:
            result[place] = failure(error)
        del live[place]

    while live:
        rows: dict[int, Verified] = {}

        def decides(place: int, rows: dict[int, Verified] = rows) -> bool:
            verified = next(live[place].rows, None)
            if verified is not None:
                rows[place] = verified
            return verified is not None

        for place in [*live]:
            attempt(place, lambda place=place: decides(place))  # type: ignore[misc]
        mx.eval([verified.arrays for verified in rows.values()])
        for place, verified in rows.items():
            turn = live[place]
            attempt(place, lambda turn=turn, v=verified: turn.take(v))  # type: ignore[misc]
    return result


def _last_of(outcome: RoundOutcome) -> RoundOutcome:
    """Return the last token alone."""
    end = len(outcome.tokens) - 1
    return replace(
        outcome,
        tokens=outcome.tokens[end:],
        origins=outcome.origins[end:],
        log_probs=outcome.log_probs[end:],
    )
