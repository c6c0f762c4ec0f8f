"""The target's forwards of one generation, and the choices from their rows.

    step       its tokens all stay: committed when it is submitted, one row chosen from
    verify     a draft's rows and one more, decided on the device together
    in turn    the same rows, decided one after the other as they are asked for

What becomes of a forward is not known here: `engine.round.round` reads it, and commits
what was accepted or rolls it back.
"""

from collections.abc import Iterator

import mlx.core as mx

from mlx_speculation.engine.drafters.base import Draft
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.outcome import Submitted, wait_for
from mlx_speculation.engine.timing import RoundClock
from mlx_speculation.models import Lane, LaneRound
from mlx_speculation.samplers import Rows, Verified, Verifier
from mlx_speculation.samplers.constraints.masks import Masks


class Forwards:
    """Submits forwards on a target lane.

    Args:
        target: the target's lane.
        sequence: the known tokens.
        verifier: decides for the request.
        top: report log-probabilities, and this many of the most probable ids; None:
            report nothing.
        masks: what the request's constraint allows, if it has one.
        exact: tell the parts of a round's time apart exactly, see
            `engine.timing`.

    Attributes:
        clock: of the round that is running.
    """

    def __init__(
        self,
        *,
        target: Lane,
        sequence: Sequence,
        verifier: Verifier,
        top: int | None,
        masks: Masks | None,
        exact: bool,
    ) -> None:
        self._target = target
        self._sequence = sequence
        self._verifier = verifier
        self._top = top
        self._masks = masks
        self._exact = exact
        self.clock = RoundClock()

    def submit_step(
        self, unseen: mx.array, behind: Submitted | None = None
    ) -> Submitted:
        """Submit a forward whose tokens all stay, or are a step's that is not read."""
        with self._target.begin(whole=True) as lane_round:
            # Layers may be submitted already.
            logits = self.clock.hand_over("verify", lane_round.forward, unseen)
            if len(logits) > 1:
                logits = logits[-1:]
            early = self._exact or self._masks is not None
            if early and behind is not None:
                wait_for(behind, self.clock)  # the masks would wait for its tokens
            if early:
                self.clock.submit("verify", logits)  # runs while masks are made
            rows = self._rows(logits, None if behind is None else unseen)
            verified = self._verifier.verify(logits, rows, top=self._top)
            self.clock.submit("verify", *verified.arrays)
            lane_round.commit(unseen.shape[0])
        return Submitted(lane_round, logits if early else None, verified)

    def submit_verify(
        self,
        lane_round: LaneRound,
        fed: mx.array,
        draft: Draft,
        step: Submitted | None,
    ) -> Submitted:
        """Submit a forward over the fed tokens, or a step's choice, and the draft."""
        logits = lane_round.forward(mx.concatenate([fed, draft.tokens]))
        logits = logits[-1 - draft.length :]
        clock = self.clock
        if not self._exact:
            clock.submit("verify", logits)  # runs while its choices' graph is built
        if step is not None:
            wait_for(step, clock)
        clock.wait("draft", draft.tokens)
        if self._exact:
            clock.submit("verify", logits)
        ahead = draft.tokens if step is None else mx.concatenate([fed, draft.tokens])
        rows = self._rows(logits, ahead, draft.length + 1)
        verified = self._verifier.verify(
            logits, rows, draft.tokens, draft.probs, top=self._top
        )
        if self._exact:
            clock.wait("verify", logits)
        clock.submit("sampler" if self._exact else "verify", *verified.arrays)
        return Submitted(lane_round, logits, verified)

    def verify_in_turn(
        self, lane_round: LaneRound, fed: mx.array, draft: Draft
    ) -> Iterator[Verified]:
        """Run a forward over the fed tokens and the draft; decide rows when asked."""
        logits = lane_round.forward(mx.concatenate([fed, draft.tokens]))
        logits = logits[-1 - draft.length :]
        if draft.length:
            self.clock.wait("draft", draft.tokens)
        self.clock.submit("verify", logits)
        self.clock.wait("verify", logits)
        drafted = draft.tokens if draft.length else None
        rows = self._rows(logits, drafted, draft.length + 1)
        return self._verifier.in_turn(logits, rows, drafted, draft.probs, top=self._top)

    def _rows(self, logits: mx.array, ahead: mx.array | None, count: int = 1) -> Rows:
        """Return what precedes each of the target's rows, and what it may choose."""
        rows = self._sequence.rows(ahead, count)
        return rows if self._masks is None else self._masks.on(logits, rows)
