"""What the caches hold when a stream ends."""

import mlx.core as mx

from mlx_speculation.engine.drafters.base import lanes_of
from mlx_speculation.engine.round.outcome import read
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.round.round import Rounds
from mlx_speculation.engine.round.verify import submit_step
from mlx_speculation.errors import NonFiniteLogitsError


class Ending:
    """Lets the caches hold what they should when a stream ends.

    Args:
        request: whose caches they are.
        rounds: what has run its rounds.
    """

    def __init__(self, request: Request, rounds: Rounds) -> None:
        self._request, self._rounds = request, rounds

    def hold_all(self) -> None:
        """Let the target's caches hold every known token, the last one included.

        Legal after `prefill`.
        """
        target, tokens = self._request.target, self._request.sequence.tokens
        if target.seen < len(tokens):
            unseen = tokens[target.seen :]
            if self._rounds.in_turn:  # to choose what comes next is to call processors
                target.feed(unseen)
                self._rounds.next_token = None
            else:
                self._rounds.in_flight = submit_step(self._request, mx.array(unseen))

    def take_back(self, count: int) -> None:
        """Let the known tokens end so many earlier, and the caches hold just them.

        Legal right after the round that emitted them, at the end of a stream. The
        round is undone, and what stays of it is fed again, row by row as in plain
        decoding.
        """
        lane_round, target = self._rounds.last_round, self._request.target
        tokens = self._request.sequence.tokens
        kept = len(tokens) - count
        if self._request.drafter is not None:
            self._request.drafter.discard()
        if target.seen > kept and lane_round is not None:
            lane_round.rollback()
        del tokens[kept:]
        self._rounds.next_token = None
        target.feed(tokens[target.seen :], step=1)

    def level_draft(self) -> None:
        """Let the draft model's caches hold what the target's hold."""
        tokens, seen = self._request.sequence.tokens, self._request.target.seen
        for lane in lanes_of(self._request.drafter):
            if lane is not None:
                lane.feed(tokens[lane.seen : seen])

    def next_token(self) -> int | None:
        """Return the token that would come next, once every known token is held.

        None where a constraint has ended the text, and where logits processors would
        have to be called.
        """
        text = self._request.text
        if text is not None and not text.goes_on:
            return None
        if self._rounds.in_flight is None:
            return self._rounds.next_token
        try:
            return read(self._rounds.in_flight).tokens[0]
        except NonFiniteLogitsError:
            return None
