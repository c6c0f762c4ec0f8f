"""Contents of the caches at the end of a stream."""

from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.round.round import Rounds
from mlx_speculation.engine.round.verify import submit_step


def hold_all(rounds: Rounds) -> None:
    """Let the target's caches hold every known token, the last one included.

    Legal once the target has read the prompt.
    """
    (request,) = rounds.running.requests
    tokens = request.sequence.tokens
    if request.target.seen < len(tokens):
        if rounds.running.sequential:  # to choose what comes next is to call processors
            request.target.feed(tokens[request.target.seen :])
            rounds.next_token = None
        else:
            rounds.in_flight = submit_step(rounds.running)


def take_back(rounds: Rounds, count: int) -> None:
    """Let the known tokens end so many earlier, and the caches hold just them.

    Legal right after the round that emitted them, at the end of a stream. The round is
    undone, and what stays of it is fed again, row by row as in plain decoding.
    """
    (request,), lane_round = rounds.running.requests, rounds.last_round
    target, tokens = request.target, request.sequence.tokens
    kept = len(tokens) - count
    request.open_drafter.discard()
    if target.seen > kept and lane_round is not None:
        lane_round.rollback()
    del tokens[kept:]
    rounds.next_token = None
    target.feed(tokens[target.seen :], step=1)


def level_draft(request: Request) -> None:
    """Let the draft model's caches hold what the target's hold."""
    tokens, seen = request.sequence.tokens, request.target.seen
    for lane in request.open_drafter.lanes:
        if lane is not None and lane.caches:
            lane.feed(tokens[lane.seen : min(seen, lane.seen + lane.room)])


def next_token(rounds: Rounds) -> int | None:
    """Return the token that would come next, once every known token is held.

    None where a constraint has ended the text, and where logits processors would have
    to be called.
    """
    (request,) = rounds.running.requests
    text = request.text
    if text is not None and not text.goes_on:
        return None
    if rounds.in_flight is None:
        return rounds.next_token
    (result,) = rounds.in_flight.read()
    return None if isinstance(result, Exception) else result.tokens[0]
