"""Contents of the caches at the end of a stream."""

from dataclasses import dataclass

from mlx_speculation.engine.round.outcome import RoundOutcome
from mlx_speculation.engine.round.round import Rounds
from mlx_speculation.engine.round.verify import submit_step


@dataclass(frozen=True, slots=True)
class FinalCaches:
    """Brings the caches of one request to the contents that the caller asked for.

    Attributes:
        hold_all: the target's caches finally hold all known tokens, even the last one.
        yielded_only: of the generated tokens, these caches finally hold only yielded
            ones.
        level_draft: the draft model's caches finally hold the same tokens as the
            target's.
    """

    rounds: Rounds
    hold_all: bool = False
    yielded_only: bool = False
    level_draft: bool = False

    def after_last_round(self) -> None:
        """With `hold_all`, feed the last token, unless it can still be taken back."""
        if self.hold_all and not self.yielded_only:
            self.feed_last()

    def settle(self, reason: str) -> None:
        """Bring the caches to their final contents; `reason` is why the text ended."""
        (request,) = self.rounds.running.requests
        if reason == "error":
            return
        # A stream closed before its first round does not feed the last prompt token.
        if self.hold_all and (reason != "closed" or request.statistics.rounds):
            self.feed_last()
        if self.level_draft:
            tokens, seen = request.sequence.tokens, request.target.seen
            for lane in request.open_drafter.lanes:
                if lane is not None and lane.caches:
                    lane.feed(tokens[lane.seen : min(seen, lane.seen + lane.room)])

    def feed_last(self) -> None:
        """Feed the known tokens unseen by the target; legal after the prefill."""
        rounds = self.rounds
        (request,) = rounds.running.requests
        tokens = request.sequence.tokens
        if request.target.seen < len(tokens):
            if rounds.running.sequential:  # a step would call the logits processors
                request.target.feed(tokens[request.target.seen :])
                rounds.last = None
            else:
                rounds.in_flight = submit_step(rounds.running)

    def take_back(self, count: int) -> None:
        """Remove the last `count` known tokens, and their rows from the caches.

        Legal only right after the round that emitted these tokens. The round is rolled
        back, and its remaining tokens are fed one by one, as in plain decoding.
        """
        (request,), last = self.rounds.running.requests, self.rounds.last
        target, tokens = request.target, request.sequence.tokens
        kept = len(tokens) - count
        request.open_drafter.discard()
        if target.seen > kept and last is not None:
            last[0].rollback()
        del tokens[kept:]
        self.rounds.last = None
        target.feed(tokens[target.seen :], step=1)

    def next_token(self) -> int | None:
        """Return the token that would come next, if the caches hold all known tokens.

        None: the text has ended, logits processors would have to be called, or the
        token was not computed.
        """
        (request,) = self.rounds.running.requests
        text = request.text
        if text is not None and not text.goes_on:
            return None
        if self.rounds.in_flight is None:
            return self._dropped()
        (result,) = self.rounds.in_flight.read()
        return None if isinstance(result, Exception) else result.tokens[0]

    def _dropped(self) -> int | None:
        """Return the first token dropped by a cut, if the caches hold all before it."""
        if self.rounds.last is None:
            return None
        _, read, result, accepted = self.rounds.last
        assert isinstance(read, RoundOutcome)
        assert isinstance(result, RoundOutcome)
        keep = len(result.tokens)
        all_held = keep < len(read.tokens) and result.first + accepted == keep
        return read.tokens[keep] if all_held else None
