"""The drafter that is a smaller model with the target's token ids."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from mlx_speculation.engine.draft_length.early_stop import largest_probability
from mlx_speculation.engine.drafters.base import Choose, Draft, goes_on
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.models import Lane, LaneRound, ReducedOutput
from mlx_speculation.samplers import Chosen

# After a round the lane lags one or two tokens behind. A longer lag is a prompt, or
# rounds without a draft: it is committed text, fed before the round and kept.
LONGEST_LAG = 8


class DraftModel:
    """Drafts a chain of tokens with a model of its own, one forward for each.

    Args:
        make_lane: makes a new lane of the draft model with empty caches.
        lane: a lane to begin with, whose caches hold tokens already.
        confidence: stop the chain before a token where the product of the largest
            probabilities up to it is below this; 0 never stops. The product does not
            depend on what is drawn from them but through the tokens drafted before,
            so that no drawn token is dropped for what it is. Costs a wait for the
            device at each token but the first.
        reduced: the draft model's output layer for some token ids, to draft from those
            only; None: from all.
    """

    def __init__(
        self,
        make_lane: Callable[[], Lane],
        lane: Lane | None = None,
        *,
        confidence: float = 0.0,
        reduced: ReducedOutput | None = None,
    ) -> None:
        self._make_lane = make_lane
        self._first_lane = lane
        self._lane = lane or make_lane()
        self._round: LaneRound | None = None
        self._confidence = confidence
        self._reduced = reduced
        self._lag = 0
        self._fed = 0

    @property
    def lane(self) -> Lane:
        """The draft model's lane."""
        return self._lane

    @property
    def whole_chain(self) -> bool:
        """Whether it drafts as many tokens as it is asked for, from all token ids."""
        return not self._confidence and self._reduced is None

    @property
    def held(self) -> list[Any]:
        """The caches, for a count of bytes."""
        return self._lane.caches

    def read_ahead(self, sequence: Sequence, fits: Callable[[int], bool]) -> bool:
        """Feed what fits of all but the last token to the lane of the next `begin`."""
        lane = self._lane
        if len(sequence.tokens) - lane.seen <= LONGEST_LAG:
            return True
        return lane.feed(sequence.tokens[lane.seen : -1], fits=fits)

    def begin(self, sequence: Sequence) -> None:
        """Take a lane with empty caches, or the given one, and feed it the prompt."""
        self._lane = self._first_lane or self._make_lane()
        self._first_lane = None
        self._round = None
        self._catch_up(sequence)

    def propose(self, sequence: Sequence, limit: int, choose: Choose) -> Draft:
        """Feed what the lane has not seen, then its own choices, `limit` tokens."""
        self._round = None
        self._catch_up(sequence)
        lag = sequence.tokens[self._lane.seen :]
        self._lag, self._fed = len(lag), 0
        self._round = self._lane.begin()
        inputs = mx.array(lag)
        chosen: list[Chosen] = []
        certainty = mx.array(1.0)
        reads = 0
        for _ in range(limit):
            logits = self._logits(self._round, inputs)
            self._fed = len(chosen)
            if self._confidence:
                certainty = certainty * largest_probability(logits)
                reads += bool(chosen)
                if chosen and float(certainty) < self._confidence:
                    break
            ahead = Draft.of(chosen).tokens if chosen else None
            ids = None if self._reduced is None else self._reduced.ids
            chosen.append(choose(logits, sequence.rows(ahead), ids))
            inputs = chosen[-1].tokens
            if not goes_on(choose, inputs):  # runs while the next step's graph is built
                break
        return Draft.of(chosen, source="model", reads=reads)

    def _logits(self, lane_round: LaneRound, tokens: mx.array) -> mx.array:
        """Feed tokens and return the last one's logits, [1, vocab] or [1, n]."""
        reduced = self._reduced
        with nullcontext() if reduced is None else reduced.only():
            logits = lane_round.forward(tokens)
        return logits if len(logits) == 1 else logits[-1:]

    def _catch_up(self, sequence: Sequence) -> None:
        """Feed committed text that is too long for a round, all but the last token."""
        if len(sequence.tokens) - self._lane.seen > LONGEST_LAG:
            self._lane.feed(sequence.tokens[self._lane.seen : -1])

    def settle(self, accepted: int) -> None:
        """Keep the lag and those of the accepted tokens that were fed.

        The last proposed one was not, unless the chain was stopped behind it.
        """
        assert self._round is not None
        self._round.commit(self._lag + min(accepted, self._fed))

    def discard(self) -> None:
        """Undo the round."""
        if self._round is not None:
            self._round.rollback()
        self._round = None
