"""How many drafted tokens are accepted in each round, counted and expected."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from expected_acceptance import (
    block_accepted,
    keyed_acceptance,
    tokenwise_acceptance,
)

from mlx_speculation.engine.draft_length.base import FixedDraftLength
from mlx_speculation.engine.drafters.draft_model import DraftModel
from mlx_speculation.engine.prompt import Sequence
from mlx_speculation.engine.round.decoder import Decoder
from mlx_speculation.engine.round.request import Request
from mlx_speculation.engine.stats import Statistics
from mlx_speculation.models import Lane
from mlx_speculation.samplers import Acceptance, Chooser, Chosen, Rows, Verifier
from mlx_speculation.samplers.acceptance import Verified


@dataclass(slots=True)
class Promised:
    """Accepted tokens of each round, counted and expected.

    Attributes:
        drafted: tokens of the round's draft.
        accepted: counted.
        expected: under keyed choice and rejection the sum, over the positions that
            were reached, of the acceptance of the two distributions there; under block
            verification what its paper's p_1 to p_k add up to.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)


class WatchedVerifier(Verifier):
    """Keeps the probabilities of each round, and the acceptance expected of them."""

    def __init__(self, chooser: Chooser, acceptance: Acceptance) -> None:
        super().__init__(chooser, acceptance)
        self._acceptance = acceptance
        self._draft_probs: list[mx.array] = []
        self.promised = Promised()

    def propose(
        self, logits: mx.array, rows: Rows, ids: mx.array | None = None
    ) -> Chosen:
        """Choose, and keep the probabilities of the choice."""
        if rows.lead == 0:
            self._draft_probs = []
        self._draft_probs.append(self.probs(logits, rows, for_draft=True))
        return super().propose(logits, rows, ids)

    def verify(
        self,
        logits: mx.array,
        rows: Rows,
        drafted: mx.array | None = None,
        draft_probs: mx.array | None = None,
        *,
        top: int | None = None,
    ) -> Verified:
        """Decide, and compare with what is expected."""
        verified = super().verify(logits, rows, drafted, draft_probs, top=top)
        if drafted is not None and verified.accepted is not None:
            target = self.probs(logits, rows)
            draft = mx.concatenate(self._draft_probs)
            expected = self._expected(target, draft, drafted, verified.accepted)
            self.promised.drafted.append(len(drafted))
            self.promised.accepted.append(_number(verified.accepted))
            self.promised.expected.append(_number(expected))
        return verified

    def _expected(
        self, target: mx.array, draft: mx.array, drafted: mx.array, accepted: mx.array
    ) -> mx.array:
        if self._acceptance == "block":
            return block_accepted(target, draft, drafted)
        keyed = self._acceptance == "keyed"
        rule = keyed_acceptance if keyed else tokenwise_acceptance
        reached = mx.arange(len(drafted)) <= accepted
        return (rule(target[:-1], draft) * reached).sum()


def watch(
    target: Any, draft: Any, chooser: Chooser, acceptance: Acceptance, job: Any, k: int
) -> tuple[Statistics, Promised]:
    """Generate with drafts of k tokens; return the counts and what was promised."""
    sequence = Sequence(list(job.prompt))
    verifier = WatchedVerifier(chooser, acceptance)
    decoder = Decoder(
        Request(
            target=Lane(target, sliding="slack"),
            sequence=sequence,
            verifier=verifier,
            drafter=DraftModel(lambda: Lane(draft, sliding="slack")),
            policy=FixedDraftLength(k),
        )
    )
    decoder.prefill.target()
    while (left := job.tokens - decoder.request.statistics.emitted) > 0:
        decoder.next_round(left, lambda outcome: outcome)
    return decoder.request.statistics, verifier.promised


def _number(value: mx.array) -> float:
    number: Any = value.item()
    return float(number)
