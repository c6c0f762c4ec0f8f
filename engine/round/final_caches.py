"""Contents of the caches at the end of a stream."""

from dataclasses import dataclass

from mlx_speculation.engine.round.round import Rounds
from mlx_speculation.engine.round.verify import submit_step


@dataclass(frozen=True, slots=True)
class FinalCaches:
    """Lets the caches of one request hold at its end what they should.

    Attributes:
        rounds: its rounds.
        hold_all: let the target's hold every known token, the last one included.
        yielded_only: let them hold no more than was yielded.
        level_draft: let the draft model's hold what the target's do.
    """

    rounds: Rounds
    hold_all: bool = False
    yielded_only: bool = False
    level_draft: bool = False

    def after_last_round(self) -> None:
        """Feed the last token, unless it may still be taken back."""
        if self.hold_all and not self.yielded_only:
            self.feed_last()

    def settle(self, reason: str) -> None:
        """Do it when the text has ended for a reason, and the prompt was begun."""
        (request,) = self.rounds.running.requests
        if reason == "error":
            return
        # Closed without a round, the prompt is all there is, and nobody asked for it.
        if self.hold_all and (reason != "closed" or request.statistics.rounds):
            self.feed_last()
        if self.level_draft:
            tokens, seen = request.sequence.tokens, request.target.seen
            for lane in request.open_drafter.lanes:
                if lane is not None and lane.caches:
                    lane.feed(tokens[lane.seen : min(seen, lane.seen + lane.room)])

    def feed_last(self) -> None:
        """Feed the known tokens that the target has not seen; the prompt was read."""
        rounds = self.rounds
        (request,) = rounds.running.requests
        tokens = request.sequence.tokens
        if request.target.seen < len(tokens):
            if rounds.running.sequential:  # to choose what comes is to call processors
                request.target.feed(tokens[request.target.seen :])
                rounds.next_token = None
            else:
                rounds.in_flight = submit_step(rounds.running)

    def take_back(self, count: int) -> None:
        """Let the known tokens end so many earlier, and the caches hold just them.

        Legal right after the round that emitted them, at the end of a stream. The round
        is undone, and what stays of it is fed again, row by row as in plain decoding.
        """
        (request,), lane_round = self.rounds.running.requests, self.rounds.last_round
        target, tokens = request.target, request.sequence.tokens
        kept = len(tokens) - count
        request.open_drafter.discard()
        if target.seen > kept and lane_round is not None:
            lane_round.rollback()
        del tokens[kept:]
        self.rounds.next_token = None
        target.feed(tokens[target.seen :], step=1)

    def next_token(self) -> int | None:
        """Return the token that would come next, once every known token is held.

        None where a constraint has ended the text, and where logits processors would
        have to be called.
        """
        (request,) = self.rounds.running.requests
        text = request.text
        if text is not None and not text.goes_on:
            return None
        if self.rounds.in_flight is None:
            return self.rounds.next_token
        (result,) = self.rounds.in_flight.read()
        return None if isinstance(result, Exception) else result.tokens[0]
