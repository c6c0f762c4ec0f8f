"""Rows decided one by one, for logits processors with an undeclared state.

Such a processor is called once for each emitted token, in order, as in plain decoding.
Therefore a row is decided only when the token before it is known, was accepted and does
not end the text. The host reads the decisions of all such requests of a round together,
one position at a time. No step is submitted ahead.
"""

from collections.abc import Generator, Iterator
from dataclasses import replace

import mlx.core as mx

from mlx_speculation.engine.round.outcome import (
    Cut,
    Read,
    RoundOutcome,
    origin_of,
    outcomes,
)
from mlx_speculation.engine.round.request import Running
from mlx_speculation.errors import NonFiniteLogitsError
from mlx_speculation.samplers import Constrained, Verified

# Yields the arrays of a row that it has decided, and goes on once they are evaluated.
Turn = Generator[list[mx.array], None, RoundOutcome]


def turn_of(
    rows: Iterator[Verified],  # each `next` decides one more row
    cut: Cut,  # gets each token once it is known
    text: Constrained | None,
    drafted: int,
) -> Turn:
    """Decide one request's rows up to a rejection, the text's end or the last row."""
    whole = RoundOutcome([], [])
    for verified in rows:
        yield verified.arrays
        (one,) = outcomes(verified, [len(verified.tokens) - 1])
        if isinstance(one, NonFiniteLogitsError):
            raise one
        accepted = whole.accepted + one.accepted
        origin = origin_of(len(whole.tokens), accepted, drafted)
        whole = RoundOutcome(
            whole.tokens + one.tokens,
            [*whole.origins, origin],
            drafted,
            accepted,
            [*whole.log_probs, *one.log_probs],
        )
        stays = whole if text is None else whole.under(text)
        reason = cut(_last_of(stays)).reason
        if reason is not None or not one.accepted:
            return replace(whole, reason=reason)
        place = None if text is None else text.place(stays.tokens)
        if place is not None and not place.goes_on:
            break
    return whole


def decide_sequentially(turns: dict[int, Turn], running: Running) -> dict[int, Read]:
    """Return each request's outcome over all its rows, or its error, by its index."""
    result: dict[int, Read] = {}
    while len(result) < len(turns):
        arrays: list[mx.array] = []
        for place, turn in turns.items():
            if place in result:
                continue
            try:
                arrays += next(turn)
            except StopIteration as end:
                result[place] = one = end.value
                reads = len(one.tokens) - 1 + (one.drafted > 0)
                running.requests[place].statistics.reads += reads
            except BaseException as error:
                result[place] = running.failure(error)
        mx.eval(arrays)
    return result


def _last_of(outcome: RoundOutcome) -> RoundOutcome:
    end = len(outcome.tokens) - 1
    return replace(
        outcome,
        tokens=outcome.tokens[end:],
        origins=outcome.origins[end:],
        log_probs=outcome.log_probs[end:],
    )
